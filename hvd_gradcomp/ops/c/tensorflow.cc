// The kernels of calls.c as one operation of TensorFlow, for tensors on a CPU.
//
// `Gradcomp` plans a call, allocates what it gives, and runs it. The plan checks the inputs: whatever
// tensors come, the worst is an InvalidArgumentError. An output that is like an input takes its memory
// if nobody else has that. ops/tensorflow/kernels.py calls it; ops/building.py compiles and links it
// with the C sources. It has one thread: TensorFlow runs the operations of several buckets at once.
//
// Layers to a bucket and back are operations of their own: as many tensors as there are layers, in
// shapes of any rank; and pieces of the bucket are given out where they lie, without a copy.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_util.h"

extern "C" {
#include "calls.h"
}

namespace {

using tensorflow::DataType;
using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::errors::ResourceExhausted;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

#define SHAPE(...)                                                                      \
  SetShapeFn([](InferenceContext *c) {                                                  \
    __VA_ARGS__;                                                                        \
    return decltype(c->GetAttr("", static_cast<std::vector<int64_t> *>(nullptr)))();    \
  })

// Shapes that Python knows while it traces.
void SetShapes(InferenceContext *c) {
  std::vector<PartialTensorShape> shapes;
  (void)c->GetAttr("shapes", &shapes).ok();
  for (int i = 0; i < c->num_outputs(); i++) {
    ShapeHandle handle = c->UnknownShape();
    if (static_cast<size_t>(i) < shapes.size() &&
        !c->MakeShapeFromPartialTensorShape(shapes[i], &handle).ok())
      handle = c->UnknownShape();
    c->set_output(i, handle);
  }
}

// `ints` are the vectors among what the kernel takes, then its integer arguments. `lengths` has a
// number for each thing that the kernel takes: the length of a vector, or -1 for one of `inputs`.
// Integers that a graph computes are in `computed`, and stand in the places `at`, in order.
REGISTER_OP("Gradcomp")
    .Input("inputs: Tin")
    .Input("computed: count * int64")
    .Output("outputs: Tout")
    .Attr("kernel: string")
    .Attr("lengths: list(int)")
    .Attr("ints: list(int)")
    .Attr("at: list(int)")
    .Attr("count: int >= 0")
    .Attr("floats: list(float)")
    .Attr("Tin: list({uint8, int64, float}) >= 0")
    .Attr("Tout: list({uint8, int64, float, bool}) >= 1")
    .Attr("shapes: list(shape)")
    .SHAPE(SetShapes(c));

// Pieces of a vector to and from the tensors that they are; zeros between them. `axes` is three
// numbers for each piece, those of where it comes from; where it goes to they are in the opposite
// order.
REGISTER_OP("GradcompFlatten")
    .Input("pieces: count * float")
    .Output("flat: float")
    .Attr("count: int >= 1")
    .Attr("offsets: list(int)")
    .Attr("axes: list(int)")
    .Attr("size: int >= 1")
    .SHAPE(int64_t size = 0; (void)c->GetAttr("size", &size).ok();
           c->set_output(0, c->Vector(size)));

REGISTER_OP("GradcompCut")
    .Input("flat: float")
    .Output("pieces: count * float")
    .Attr("count: int >= 1")
    .Attr("offsets: list(int)")
    .Attr("axes: list(int)")
    .Attr("shapes: list(shape)")
    .SHAPE(SetShapes(c));

int64_t NumberOf(DataType type) {
  switch (type) {
    case tensorflow::DT_UINT8: return UINT8;
    case tensorflow::DT_INT64: return INT64;
    case tensorflow::DT_FLOAT: return FLOAT;
    default: return BOOL;
  }
}

class Gradcomp : public OpKernel {
 public:
  explicit Gradcomp(OpKernelConstruction *c) : OpKernel(c) {
    std::vector<float> floats;
    OP_REQUIRES_OK(c, c->GetAttr("kernel", &name_));
    OP_REQUIRES_OK(c, c->GetAttr("floats", &floats));
    OP_REQUIRES_OK(c, c->GetAttr("lengths", &lengths_));
    OP_REQUIRES_OK(c, c->GetAttr("ints", &ints_));
    OP_REQUIRES_OK(c, c->GetAttr("at", &at_));
    OP_REQUIRES_OK(c, c->GetAttr("count", &computed_));
    int64_t all = static_cast<int64_t>(ints_.size()), vectors = 0, tensors = 0;
    for (int64_t place : at_)
      OP_REQUIRES(c, 0 <= place && place < all, InvalidArgument("there is no integer ", place));
    for (int64_t length : lengths_) {
      tensors += length < 0;
      OP_REQUIRES(c, length <= all - vectors, InvalidArgument("vectors of more integers"));
      vectors += length < 0 ? 0 : length;
    }
    OP_REQUIRES(c, tensors == c->num_inputs() - computed_, InvalidArgument("other inputs"));
    floats_.assign(floats.begin(), floats.end());
    number_ = kernel_number(name_.c_str());
    OP_REQUIRES(c, number_ >= 0, InvalidArgument("there is no kernel ", name_));
  }

  void Compute(OpKernelContext *c) override {
    size_t n_in = lengths_.size(), n_out = c->num_outputs();
    std::vector<buffer> in(n_in), out(n_out);
    std::vector<Tensor> copies(n_in);
    std::vector<int64_t> ints = ints_;
    std::vector<int> input(n_in, -1);  // which of this operation's
    size_t filled = 0;
    for (int i = c->num_inputs() - computed_; i < c->num_inputs(); i++) {
      auto values = c->input(i).flat<int64_t>();
      for (int64_t k = 0; k < values.size(); k++) {
        OP_REQUIRES(c, filled < at_.size(), InvalidArgument("too many integers"));
        ints[at_[filled++]] = values(k);
      }
    }
    OP_REQUIRES(c, filled == at_.size(), InvalidArgument("too few integers"));
    int64_t *next = ints.data();
    for (size_t i = 0, tensor = 0; i < n_in; i++) {
      int64_t length = lengths_[i];
      if (length < 0) {
        input[i] = static_cast<int>(tensor++);
        OP_REQUIRES_OK(c, Read(c, input[i], &in[i], &copies[i]));
      } else {
        in[i] = {next, INT64, 1, 1, length, 8 * length, -1};
        next += length;
      }
    }
    call now = {in.data(),
                out.data(),
                next,
                floats_.data(),
                static_cast<int64_t>(n_in),
                static_cast<int64_t>(n_out),
                ints.data() + ints.size() - next,
                static_cast<int64_t>(floats_.size()),
                nullptr,
                0,
                1};
    OP_REQUIRES(c, !kernel_plan(number_, &now), InvalidArgument(name_, ": ", kernel_error()));
    for (size_t i = 0; i < n_out; i++) {
      buffer &x = out[i];
      OP_REQUIRES(c, x.dtype == NumberOf(c->expected_output_dtype(i)),
                  InvalidArgument(name_, ": output ", i, " has another type"));
      Tensor *result = nullptr;
      if (x.like >= 0) {
        int from = input[x.like];
        OP_REQUIRES(c, from >= 0, InvalidArgument(name_, ": output ", i, " is like a vector"));
        OP_REQUIRES_OK(c, c->forward_input_or_allocate_output({from}, static_cast<int>(i),
                                                              c->input(from).shape(), &result));
      } else {
        TensorShape shape;
        if (x.rank == 2) shape.AddDim(x.rows);
        if (x.rank > 0) shape.AddDim(x.length);
        OP_REQUIRES_OK(c, c->allocate_output(static_cast<int>(i), shape, &result));
      }
      x.data = const_cast<char *>(result->tensor_data().data());
    }
    Tensor scratch;
    if (now.scratch_bytes) {
      TensorShape bytes({now.scratch_bytes});
      OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_UINT8, bytes, &scratch));
      now.scratch = const_cast<char *>(scratch.tensor_data().data());
    }
    int failed = kernel_run(number_, &now);
    OP_REQUIRES(c, failed != BEYOND,
                InvalidArgument("assertion failed: hvd_gradcomp: an index points outside of its "
                                "bucket, or does not ascend: a payload is damaged"));
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to compress a bucket with"));
  }

 private:
  // Describes an input. C reads bytes as words; a slice may begin anywhere, and is then copied.
  static absl::Status Read(OpKernelContext *c, int i, buffer *x, Tensor *copy) {
    const Tensor *from = &c->input(i);
    auto data = from->tensor_data();
    if (reinterpret_cast<uintptr_t>(data.data()) % 4) {
      auto status = c->allocate_temp(from->dtype(), from->shape(), copy);
      if (!status.ok()) return status;
      std::memcpy(const_cast<char *>(copy->tensor_data().data()), data.data(), data.size());
      data = copy->tensor_data();
    }
    int rank = from->dims();
    int64_t length = rank ? from->dim_size(rank - 1) : 1, rows = 1;
    for (int axis = 0; axis + 1 < rank; axis++) rows *= from->dim_size(axis);
    int64_t apart = length * tensorflow::DataTypeSize(from->dtype());
    *x = {const_cast<char *>(data.data()), NumberOf(from->dtype()), rank, rows, length, apart, -1};
    return absl::OkStatus();
  }

  std::string name_;
  std::vector<double> floats_;
  std::vector<int64_t> lengths_, ints_, at_;
  int number_ = -1, computed_ = 0;
};

constexpr int64_t CACHED = 1 << 18;  // elements that are written past the caches if there are more

// Base of what lies in a vector in pieces: in order, none over another.
class InPieces : public OpKernel {
 public:
  explicit InPieces(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("offsets", &offsets_));
    OP_REQUIRES_OK(c, c->GetAttr("axes", &axes_));
    OP_REQUIRES(c, axes_.size() == 3 * offsets_.size(), InvalidArgument("a piece has three axes"));
  }

 protected:
  // Whether a piece of so many elements is what its axes say, and fits before the next, or the end.
  bool Fits(OpKernelContext *c, size_t piece, int64_t elements, int64_t size) {
    bool known = piece < offsets_.size();
    int64_t start = known ? offsets_[piece] : size + 1, count = 1;
    int64_t next = piece + 1 < offsets_.size() ? offsets_[piece + 1] : size;
    for (size_t k = 3 * piece; known && k < 3 * piece + 3; k++)
      known = axes_[k] >= 0 && !__builtin_mul_overflow(count, axes_[k], &count);
    if (known && count == elements && 0 <= start && start <= next && next <= size &&
        elements <= next - start)
      return true;
    c->CtxFailure(InvalidArgument("piece ", piece, " of ", elements, " elements does not fit"));
    return false;
  }

  // Whether a piece lies alike in the opposite order: it is empty, or all but one axis are of 1.
  bool Stays(size_t piece) const {
    const int64_t *axes = &axes_[3 * piece];
    return !(axes[0] && axes[1] && axes[2]) ||
           (axes[0] == 1) + (axes[1] == 1) + (axes[2] == 1) > 1;
  }

  void Copy(size_t piece, const float *from, float *to) const {
    const int64_t *axes = &axes_[3 * piece];
    int64_t first = axes[0], middle = axes[1], last = axes[2], count = first * middle * last;
    if (Stays(piece))
      std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
    else
      reverse(from, first, middle, last, middle * last, to, middle * first, count > CACHED, 1);
  }

  std::vector<int64_t> offsets_, axes_;
};

class Flatten : public InPieces {
 public:
  explicit Flatten(OpKernelConstruction *c) : InPieces(c) {
    OP_REQUIRES_OK(c, c->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext *c) override {
    Tensor *flat = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({size_}), &flat));
    float *out = flat->flat<float>().data();
    int64_t end = 0;
    for (int i = 0; i < c->num_inputs(); i++) {
      int64_t count = c->input(i).NumElements();
      if (!Fits(c, i, count, size_)) return;
      std::memset(out + end, 0, sizeof(float) * static_cast<size_t>(offsets_[i] - end));
      Copy(i, c->input(i).flat<float>().data(), out + offsets_[i]);
      end = offsets_[i] + count;
    }
    std::memset(out + end, 0, sizeof(float) * static_cast<size_t>(size_ - end));
  }

 private:
  int64_t size_ = 0;
};

// What pieces hold that stay as they are stays where it is, if it is aligned there.
class Cut : public InPieces {
 public:
  explicit Cut(OpKernelConstruction *c) : InPieces(c) {
    OP_REQUIRES_OK(c, c->GetAttr("shapes", &shapes_));
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &flat = c->input(0);
    OP_REQUIRES(c, flat.dims() == 1 && shapes_.size() == static_cast<size_t>(c->num_outputs()),
                InvalidArgument("a vector is cut into as many pieces as there are shapes"));
    for (int i = 0; i < c->num_outputs(); i++) {
      int64_t count = shapes_[i].num_elements();
      if (!Fits(c, i, count, flat.dim_size(0))) return;
      if (!Stays(i)) {
        Tensor *out = nullptr;
        OP_REQUIRES_OK(c, c->allocate_output(i, shapes_[i], &out));
        Copy(i, flat.flat<float>().data() + offsets_[i], out->flat<float>().data());
        continue;
      }
      Tensor piece = flat.Slice(offsets_[i], offsets_[i] + count), shaped;
      if (!piece.IsAligned()) piece = tensorflow::tensor::DeepCopy(piece);
      OP_REQUIRES(c, shaped.CopyFrom(piece, shapes_[i]), InvalidArgument("no such shape"));
      c->set_output(i, shaped);
    }
  }

 private:
  std::vector<TensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(Name("Gradcomp").Device(DEVICE_CPU), Gradcomp);
REGISTER_KERNEL_BUILDER(Name("GradcompFlatten").Device(DEVICE_CPU), Flatten);
REGISTER_KERNEL_BUILDER(Name("GradcompCut").Device(DEVICE_CPU), Cut);

}  // namespace
