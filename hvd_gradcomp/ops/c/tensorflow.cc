// The functions of quant.c, threshold.c and topk.c as operations of TensorFlow, for tensors on a CPU.
//
// They shadow composites of ops/interface/ and give the same bits. Shapes are checked here, before
// C walks over memory: whatever tensors come, the worst is an InvalidArgumentError. ops/tensorflow/
// calls them; ops/building.py compiles and links them into one library. An operation has one
// thread: TensorFlow runs those of several buckets at the same time.
//
// `bands` is {start, rows, length} for each band, one after another; see bands.py.
#include <cstdint>
#include <cstring>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_util.h"

extern "C" {
#include "kernels.h"
}

namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::errors::ResourceExhausted;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kGroup = 32;  // codes that are packed together

// -- shapes --------------------------------------------------------------------------------------

int64_t GroupsOf(InferenceContext *c) {
  std::vector<int64_t> numbers;
  int64_t groups = 0;
  if (c->GetAttr("bands", &numbers).ok())
    for (size_t i = 1; i < numbers.size(); i += 3) groups += numbers[i];
  return groups;
}

ShapeHandle PackedLike(InferenceContext *c, ShapeHandle x, int64_t bits) {
  if (!c->RankKnown(x) || c->Rank(x) != 1 || !c->ValueKnown(c->Dim(x, 0)))
    return c->Vector(InferenceContext::kUnknownDim);
  return c->Vector(c->Value(c->Dim(x, 0)) / 8 * bits);
}

#define SHAPE(...)                                                                      \
  SetShapeFn([](InferenceContext *c) {                                                  \
    __VA_ARGS__;                                                                        \
    return decltype(c->GetAttr("", static_cast<std::vector<int64_t> *>(nullptr)))();    \
  })

REGISTER_OP("GradcompBitPlanes")
    .Input("groups: int64")
    .Output("planes: int64")
    .Attr("bits: int >= 1")
    .SHAPE(int64_t bits = 0; (void)c->GetAttr("bits", &bits).ok();
           ShapeHandle x = c->input(0);
           c->set_output(0, c->Matrix(c->RankKnown(x) && c->Rank(x) == 2 ? c->Dim(x, 0)
                                                                         : c->UnknownDim(),
                                      bits)));

REGISTER_OP("GradcompFromBitPlanes")
    .Input("planes: int64")
    .Output("groups: int64")
    .SHAPE(ShapeHandle x = c->input(0);
           c->set_output(0, c->Matrix(c->RankKnown(x) && c->Rank(x) == 2 ? c->Dim(x, 0)
                                                                         : c->UnknownDim(),
                                      kGroup)));

REGISTER_OP("GradcompWeightedSum")
    .Input("data: uint8")
    .Output("sum: int64")
    .SHAPE(ShapeHandle rows = c->UnknownShape(); ShapeHandle x = c->input(0);
           if (c->RankKnown(x) && c->Rank(x) >= 1) (void)c->Subshape(x, 0, -1, &rows).ok();
           c->set_output(0, rows));

// An addition that no optimizer of graphs takes apart: it sums a chain of them in another order.
REGISTER_OP("GradcompAccumulate")
    .Input("x: float")
    .Input("y: float")
    .Output("total: float")
    .SHAPE(c->set_output(0, c->input(0)));

REGISTER_OP("GradcompFinite")
    .Input("x: float")
    .Output("finite: bool")
    .SHAPE(c->set_output(0, c->Scalar()));

REGISTER_OP("GradcompFrame")
    .Input("words: int64")
    .Input("body: uint8")
    .Output("frame: uint8")
    .SHAPE(ShapeHandle words = c->input(0); ShapeHandle body = c->input(1);
           bool known = c->RankKnown(words) && c->Rank(words) == 1 && c->RankKnown(body) &&
                        c->Rank(body) == 1 && c->ValueKnown(c->Dim(words, 0)) &&
                        c->ValueKnown(c->Dim(body, 0));
           c->set_output(0, c->Vector(known ? 4 * (c->Value(c->Dim(words, 0)) + 1) +
                                                  c->Value(c->Dim(body, 0))
                                            : InferenceContext::kUnknownDim)));

// `fields` is {word, lowest bit, bits} for each field, one after another.
REGISTER_OP("GradcompExamine")
    .Input("frames: uint8")
    .Input("expected: int64")
    .Output("words: int64")
    .Output("held: bool")
    .Attr("count: int >= 0")
    .Attr("fields: list(int)")
    .SHAPE(int64_t count = 0; (void)c->GetAttr("count", &count).ok();
           std::vector<int64_t> fields; (void)c->GetAttr("fields", &fields).ok();
           ShapeHandle x = c->input(0);
           auto rows = c->RankKnown(x) && c->Rank(x) == 2 ? c->Dim(x, 0) : c->UnknownDim();
           c->set_output(0, c->Matrix(rows, count));
           c->set_output(1, c->Matrix(static_cast<int64_t>(fields.size() / 3 + 1), rows)));

REGISTER_OP("GradcompKey")
    .Input("step: int64")
    .Output("key: int64")
    .Attr("salt: int")
    .SHAPE(c->set_output(0, c->Vector(2)));

REGISTER_OP("GradcompGroupMaxima")
    .Input("x: float")
    .Output("maxima: float")
    .Attr("bands: list(int)")
    .SHAPE(c->set_output(0, c->Vector(GroupsOf(c))));

REGISTER_OP("GradcompGroupSquares")
    .Input("x: float")
    .Output("squares: float")
    .Attr("bands: list(int)")
    .SHAPE(c->set_output(0, c->Vector(GroupsOf(c))));

REGISTER_OP("GradcompLayerHistograms")
    .Input("x: float")
    .Output("counts: int64")
    .Attr("bands: list(int)")
    .Attr("bins: int >= 1")
    .SHAPE(int64_t bins = 0; (void)c->GetAttr("bins", &bins).ok();
           c->set_output(0, c->Matrix(bins, GroupsOf(c))));

REGISTER_OP("GradcompEncodeLevels")
    .Input("x: float")
    .Input("scale: float")
    .Input("key: int64")
    .Output("packed: uint8")
    .Attr("bands: list(int)")
    .Attr("bits: int >= 2")
    .SHAPE(int64_t bits = 0; (void)c->GetAttr("bits", &bits).ok();
           c->set_output(0, PackedLike(c, c->input(0), bits)));

REGISTER_OP("GradcompAddLevels")
    .Input("base: float")
    .Input("packed: uint8")
    .Input("scale: float")
    .Input("weights: float")
    .Output("total: float")
    .Attr("bands: list(int)")
    .Attr("bits: int >= 2")
    .Attr("from_zero: bool")
    .SHAPE(c->set_output(0, c->input(0)));

REGISTER_OP("GradcompEncodeSigns")
    .Input("x: float")
    .Output("above: float")
    .Output("below: float")
    .Output("packed: uint8")
    .Attr("bands: list(int)")
    .SHAPE(c->set_output(0, c->Vector(GroupsOf(c))); c->set_output(1, c->Vector(GroupsOf(c)));
           c->set_output(2, PackedLike(c, c->input(0), 1)));

REGISTER_OP("GradcompAddSigns")
    .Input("base: float")
    .Input("packed: uint8")
    .Input("above: float")
    .Input("below: float")
    .Input("weights: float")
    .Output("total: float")
    .Attr("bands: list(int)")
    .Attr("from_zero: bool")
    .SHAPE(c->set_output(0, c->input(0)));

// `CapacitySchedule.next_level`; the state is a `CapacityState`.
REGISTER_OP("GradcompClimb")
    .Input("state: fields * int64")
    .Output("rung: int64")
    .Output("capacity: int64")
    .Output("dense: bool")
    .Output("calm: int64")
    .Output("peak: int64")
    .Output("changes: int64")
    .Attr("fields: int >= 5")
    .Attr("capacities: list(int)")
    .Attr("patience: int >= 1")
    .SHAPE(for (int i = 0; i < c->num_outputs(); i++) c->set_output(i, c->Scalar()));

// What all passes know of their bucket.
#define BUCKET Attr("sizes: list(int)").Attr("block_bits: int >= 0").Attr("size: int >= 1")

// Words, and places where `capacity` is negative. `rule` is the numbers of that struct.
REGISTER_OP("GradcompWriteWords")
    .Input("memory: fields * float")
    .Input("gradient: float")
    .Input("moment: moments * float")
    .Input("turn: int64")
    .Input("capacity: int64")
    .Output("body: uint8")
    .Output("sent: int64")
    .Output("wanted: int64")
    .Output("per_layer: int64")
    .Output("settled: fields * float")
    .Attr("fields: int >= 1")
    .Attr("moments: int >= 0")
    .Attr("rule: list(float)")
    .BUCKET
    .SHAPE(std::vector<int64_t> sizes; (void)c->GetAttr("sizes", &sizes).ok();
           c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
           c->set_output(1, c->Scalar()); c->set_output(2, c->Scalar());
           c->set_output(3, c->Vector(static_cast<int64_t>(sizes.size())));
           for (int i = 4; i < c->num_outputs(); i++) c->set_output(i, c->input(i - 4)));

REGISTER_OP("GradcompAddWords")
    .Input("room: float")
    .Input("bodies: uint8")
    .Input("weights: float")
    .Input("capacity: int64")
    .Output("total: float")
    .Attr("rule: list(float)")
    .BUCKET
    .SHAPE(c->set_output(0, c->input(0)));

// With `looks` the memory stays as it is.
REGISTER_OP("GradcompWriteLargest")
    .Input("memory: fields * float")
    .Input("gradient: float")
    .Input("quota: int64")
    .Input("slack: int64")
    .Input("hint: float")
    .Input("turn: int64")
    .Input("form: int64")
    .Output("body: uint8")
    .Output("sent: int64")
    .Output("per_layer: int64")
    .Output("next: float")
    .Output("settled: fields * float")
    .Attr("fields: int >= 1")
    .Attr("momentum: float")
    .Attr("nesterov: bool")
    .Attr("masking: bool")
    .Attr("looks: bool")
    .Attr("whole: bool")
    .Attr("strides: list(int)")
    .BUCKET
    .SHAPE(std::vector<int64_t> sizes; (void)c->GetAttr("sizes", &sizes).ok();
           c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
           c->set_output(1, c->Scalar());
           c->set_output(2, c->Vector(static_cast<int64_t>(sizes.size())));
           int fields = c->num_outputs() - 4; c->set_output(3, c->input(fields + 3));
           for (int i = 0; i < fields; i++) c->set_output(4 + i, c->input(i)));

REGISTER_OP("GradcompAddLargest")
    .Input("room: float")
    .Input("bodies: uint8")
    .Input("weights: float")
    .Input("form: int64")
    .Output("total: float")
    .BUCKET
    .SHAPE(c->set_output(0, c->input(0)));

REGISTER_OP("GradcompReadChosen")
    .Input("r: float")
    .Input("gradient: float")
    .Input("body: uint8")
    .Input("form: int64")
    .Output("values: float")
    .BUCKET
    .SHAPE(c->set_output(0, c->Vector(InferenceContext::kUnknownDim)));

REGISTER_OP("GradcompReplaceChosen")
    .Input("r: float")
    .Input("gradient: float")
    .Input("body: uint8")
    .Input("total: float")
    .Input("form: int64")
    .Output("mean: float")
    .Output("after: float")
    .Output("per_layer: int64")
    .Attr("beta: float")
    .Attr("keeps: float")
    .BUCKET
    .SHAPE(std::vector<int64_t> sizes; (void)c->GetAttr("sizes", &sizes).ok();
           c->set_output(0, c->input(1)); c->set_output(1, c->input(0));
           c->set_output(2, c->Vector(static_cast<int64_t>(sizes.size()))));

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
    .SHAPE(std::vector<tensorflow::PartialTensorShape> shapes;
           (void)c->GetAttr("shapes", &shapes).ok();
           for (size_t i = 0; i < shapes.size() && i < static_cast<size_t>(c->num_outputs()); i++) {
             ShapeHandle handle;
             if (!c->MakeShapeFromPartialTensorShape(shapes[i], &handle).ok())
               handle = c->UnknownShape();
             c->set_output(static_cast<int>(i), handle);
           });

// -- kernels -------------------------------------------------------------------------------------

const float *Floats(const Tensor &x) { return x.flat<float>().data(); }

float *NewFloats(OpKernelContext *c, int index, const TensorShape &shape) {
  Tensor *out = nullptr;
  auto status = c->allocate_output(index, shape, &out);
  if (!status.ok()) c->CtxFailure(status);
  return status.ok() ? out->flat<float>().data() : nullptr;
}

int64_t *NewIntegers(OpKernelContext *c, const TensorShape &shape) {
  Tensor *out = nullptr;
  auto status = c->allocate_output(0, shape, &out);
  if (!status.ok()) c->CtxFailure(status);
  return status.ok() ? out->flat<int64_t>().data() : nullptr;
}

uint32_t *NewWords(OpKernelContext *c, int index, int64_t bytes) {
  Tensor *out = nullptr;
  auto status = c->allocate_output(index, TensorShape({bytes}), &out);
  if (!status.ok()) c->CtxFailure(status);
  return status.ok() ? reinterpret_cast<uint32_t *>(out->flat<uint8_t>().data()) : nullptr;
}

// Bytes that C reads as words, or floats; a slice may begin anywhere, and is then copied.
const void *Aligned(OpKernelContext *c, const Tensor &x, Tensor *copy) {
  auto data = x.tensor_data();
  if (reinterpret_cast<uintptr_t>(data.data()) % 4 == 0) return data.data();
  auto status = c->allocate_temp(x.dtype(), x.shape(), copy);
  if (!status.ok()) {
    c->CtxFailure(status);
    return nullptr;
  }
  void *room = const_cast<char *>(copy->tensor_data().data());
  std::memcpy(room, data.data(), data.size());
  return room;
}

class BitPlanes : public OpKernel {
 public:
  explicit BitPlanes(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("bits", &bits_));
    OP_REQUIRES(c, bits_ <= 32, InvalidArgument("bits must be at most 32, it is ", bits_));
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &groups = c->input(0);
    OP_REQUIRES(c, groups.dims() == 2 && groups.dim_size(1) == kGroup,
                InvalidArgument("groups must be [m, 32], they are ", groups.shape().DebugString()));
    int64_t m = groups.dim_size(0), *out = NewIntegers(c, TensorShape({m, bits_}));
    if (out) bit_planes(groups.flat<int64_t>().data(), m, bits_, out);
  }

 private:
  int bits_ = 0;
};

class FromBitPlanes : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext *c) override {
    const Tensor &planes = c->input(0);
    OP_REQUIRES(c, planes.dims() == 2 && planes.dim_size(1) <= 32,
                InvalidArgument("planes must be [m, bits], at most 32 bits, they are ",
                                planes.shape().DebugString()));
    int64_t m = planes.dim_size(0), *out = NewIntegers(c, TensorShape({m, kGroup}));
    int bits = static_cast<int>(planes.dim_size(1));
    if (out) from_bit_planes(planes.flat<int64_t>().data(), m, bits, out);
  }
};

class WeightedSum : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext *c) override {
    const Tensor &data = c->input(0);
    OP_REQUIRES(c, data.dims() >= 1 && data.dim_size(data.dims() - 1) % 4 == 0,
                InvalidArgument("data must be rows of 32-bit words, it is ",
                                data.shape().DebugString()));
    TensorShape rows = data.shape();
    int64_t words = rows.dim_size(rows.dims() - 1) / 4;
    rows.RemoveLastDims(1);
    Tensor copy;
    int64_t *out = NewIntegers(c, rows);
    auto *from = static_cast<const uint32_t *>(Aligned(c, data, &copy));
    if (!c->status().ok()) return;
    for (int64_t row = 0; row < rows.num_elements(); row++)
      out[row] = weighted_sum(from + row * words, words, 1);
  }
};

class Finite : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext *c) override {
    Tensor *out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &out));
    out->scalar<bool>()() = all_finite(Floats(c->input(0)), c->input(0).NumElements(), 1);
  }
};

class Accumulate : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext *c) override {
    const Tensor &x = c->input(0), &y = c->input(1);
    Tensor *total = nullptr;
    OP_REQUIRES(c, x.shape() == y.shape(),
                InvalidArgument(y.shape().DebugString(), " is added to ", x.shape().DebugString()));
    OP_REQUIRES_OK(c, c->forward_input_or_allocate_output({0}, 0, x.shape(), &total));
    add_vectors(Floats(x), Floats(y), total->flat<float>().data(), x.NumElements());
  }
};

class Frame : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext *c) override {
    const Tensor &words = c->input(0), &body = c->input(1);
    OP_REQUIRES(c, words.dims() == 1 && body.dims() == 1 && body.dim_size(0) % 4 == 0,
                InvalidArgument("a frame is a vector of words and one of bytes, a multiple of 4, "
                                "not ",
                                words.shape().DebugString(), " and ", body.shape().DebugString()));
    int64_t count = words.dim_size(0), bytes = body.dim_size(0);
    uint32_t *out = NewWords(c, 0, 4 * (count + 1) + bytes);
    if (!out) return;
    auto *from = words.flat<int64_t>().data();
    for (int64_t i = 0; i < count; i++) out[i] = static_cast<uint32_t>(from[i]);
    uint32_t *behind = out + count + 1;
    std::memcpy(behind, body.tensor_data().data(), bytes);
    out[count] = frame_sum(out, count, behind, bytes / 4, 1);
  }
};

class Examine : public OpKernel {
 public:
  explicit Examine(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("count", &count_));
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(c, c->GetAttr("fields", &numbers));
    OP_REQUIRES(c, numbers.size() % 3 == 0, InvalidArgument("a field is three numbers"));
    for (size_t i = 0; i < numbers.size(); i += 3) {
      field next = {numbers[i], numbers[i + 1], numbers[i + 2]};
      OP_REQUIRES(c,
                  0 <= next.word && next.word < count_ && 0 <= next.low && next.low < 32 &&
                      0 < next.bits && next.bits <= 32,
                  InvalidArgument("a field is a word, a lowest bit and bits, not ", next.word, ", ",
                                  next.low, ", ", next.bits));
      fields_.push_back(next);
    }
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &frames = c->input(0), &expected = c->input(1);
    int64_t fields = static_cast<int64_t>(fields_.size());
    OP_REQUIRES(c, expected.dims() == 1 && expected.dim_size(0) == fields,
                InvalidArgument("expected is ", expected.shape().DebugString(), " for ", fields,
                                " fields"));
    OP_REQUIRES(c,
                frames.dims() == 2 && frames.dim_size(1) % 4 == 0 &&
                    frames.dim_size(1) / 4 > count_,
                InvalidArgument("frames of ", count_, " words are ", frames.shape().DebugString()));
    int64_t rows = frames.dim_size(0), length = frames.dim_size(1) / 4;
    int64_t *words = NewIntegers(c, TensorShape({rows, count_}));
    Tensor *held = nullptr, copy;
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({fields + 1, rows}), &held));
    auto *from = static_cast<const uint32_t *>(Aligned(c, frames, &copy));
    if (!c->status().ok()) return;
    auto *flags = reinterpret_cast<uint8_t *>(held->flat<bool>().data());
    examine(from, rows, length, length, count_, fields_.data(), fields,
            expected.flat<int64_t>().data(), words, flags, 1);
  }

 private:
  int64_t count_ = 0;
  std::vector<field> fields_;
};

uint32_t Mixed(uint32_t x) {
  for (int i = 0; i < 2; i++) x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

class Key : public OpKernel {
 public:
  explicit Key(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("salt", &salt_));
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &step = c->input(0);
    OP_REQUIRES(c, step.dims() == 0,
                InvalidArgument("step must be a scalar, it is ", step.shape().DebugString()));
    int64_t *key = NewIntegers(c, TensorShape({2}));
    if (!key) return;
    uint32_t mixed = Mixed(static_cast<uint32_t>(step.scalar<int64_t>()()));
    uint32_t first = Mixed(mixed ^ static_cast<uint32_t>(salt_));
    key[0] = first;
    key[1] = Mixed(first ^ 0x9e3779b9u);
  }

 private:
  int64_t salt_ = 0;
};

// Base of what goes over groups: its bands are in order, and none reaches beyond the vector.
class OverGroups : public OpKernel {
 public:
  explicit OverGroups(OpKernelConstruction *c) : OpKernel(c) {
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(c, c->GetAttr("bands", &numbers));
    OP_REQUIRES(c, numbers.size() % 3 == 0, InvalidArgument("a band is three numbers"));
    for (size_t i = 0; i < numbers.size(); i += 3) {
      band next = {numbers[i], numbers[i + 1], numbers[i + 2]};
      OP_REQUIRES(c,
                  next.start >= end_ && next.rows > 0 && next.length > 0 &&
                      next.rows <= (INT64_MAX - next.start) / next.length,
                  InvalidArgument("bands must be ascending, without overlap, and not empty"));
      bands_.push_back(next);
      groups_ += next.rows;
      end_ = next.start + next.rows * next.length;
    }
  }

 protected:
  // Whether x is a vector with room for all groups; of whole groups of 32 where it is packed.
  bool Fits(OpKernelContext *c, const Tensor &x, bool packed) {
    if (x.dims() == 1 && x.dim_size(0) >= end_ && !(packed && x.dim_size(0) % kGroup)) return true;
    c->CtxFailure(InvalidArgument("expected a vector of at least ", end_, " elements",
                                  packed ? ", a multiple of 32" : "", ", this is ",
                                  x.shape().DebugString()));
    return false;
  }

  // Whether x is [extents].
  bool Is(OpKernelContext *c, const char *what, const Tensor &x, std::vector<int64_t> extents) {
    bool same = x.dims() == static_cast<int>(extents.size());
    for (size_t i = 0; same && i < extents.size(); i++) same = x.dim_size(i) == extents[i];
    if (!same)
      c->CtxFailure(InvalidArgument(what, " is ", x.shape().DebugString(), ", expected ",
                                    TensorShape(extents).DebugString()));
    return same;
  }

  // Whether x has a row a rank, of at least so many items: what was padded has more.
  bool IsByRank(OpKernelContext *c, const char *what, const Tensor &x, int64_t ranks,
                int64_t least) {
    if (x.dims() == 2 && x.dim_size(0) == ranks && x.dim_size(1) >= least) return true;
    c->CtxFailure(InvalidArgument(what, " is ", x.shape().DebugString(), ", expected [", ranks,
                                  ", at least ", least, "]"));
    return false;
  }

  // Whether packed codes have a row of whole words a rank, of at least so many bytes.
  bool IsPacked(OpKernelContext *c, const Tensor &x, int64_t ranks, int64_t least) {
    if (!IsByRank(c, "packed", x, ranks, least)) return false;
    if (x.dim_size(1) % 4 == 0) return true;
    c->CtxFailure(InvalidArgument("packed has rows of ", x.dim_size(1), " bytes, not of words"));
    return false;
  }

  int64_t count() const { return static_cast<int64_t>(bands_.size()); }

  std::vector<band> bands_;
  int64_t groups_ = 0, end_ = 0;
};

class GroupMaxima : public OverGroups {
 public:
  using OverGroups::OverGroups;

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), false)) return;
    float *out = NewFloats(c, 0, TensorShape({groups_}));
    if (out) group_maxima(bands_.data(), count(), Floats(c->input(0)), out, 1);
  }
};

class GroupSquares : public OverGroups {
 public:
  using OverGroups::OverGroups;

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), false)) return;
    float *out = NewFloats(c, 0, TensorShape({groups_}));
    if (!out) return;
    int failed = group_squares(bands_.data(), count(), Floats(c->input(0)), out, 1);
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to compress a layer with"));
  }
};

// Of layers: bands of one row.
class LayerHistograms : public OverGroups {
 public:
  explicit LayerHistograms(OpKernelConstruction *c) : OverGroups(c) {
    OP_REQUIRES_OK(c, c->GetAttr("bins", &bins_));
    for (const band &layer : bands_) {
      OP_REQUIRES(c, layer.rows == 1, InvalidArgument("a layer is a band of one row"));
      offsets_.push_back(layer.start);
      sizes_.push_back(layer.length);
    }
  }

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), false)) return;
    int64_t *out = NewIntegers(c, TensorShape({bins_, count()}));
    auto *offsets = offsets_.data(), *sizes = sizes_.data();
    if (out) layer_histograms(offsets, sizes, count(), Floats(c->input(0)), bins_, out, 1);
  }

 private:
  int64_t bins_ = 0;
  std::vector<int64_t> offsets_, sizes_;
};

// Base of what has codes of `bits` bits, 2 to 8, for elements with levels.
class Levels : public OverGroups {
 public:
  explicit Levels(OpKernelConstruction *c) : OverGroups(c) {
    OP_REQUIRES_OK(c, c->GetAttr("bits", &bits_));
    OP_REQUIRES(c, bits_ <= 8, InvalidArgument("bits must be at most 8, it is ", bits_));
  }

 protected:
  int bits_ = 0;
};

class EncodeLevels : public Levels {
 public:
  using Levels::Levels;

  void Compute(OpKernelContext *c) override {
    const Tensor &x = c->input(0), &scale = c->input(1), &key = c->input(2);
    if (!Fits(c, x, true) || !Is(c, "scale", scale, {groups_}) || !Is(c, "key", key, {2})) return;
    int64_t n = x.dim_size(0);
    uint32_t *out = NewWords(c, 0, n / 8 * bits_);
    auto *keys = key.flat<int64_t>().data();
    if (out)
      encode_levels(bands_.data(), count(), Floats(x), n, Floats(scale), bits_,
                    static_cast<uint32_t>(keys[0]), static_cast<uint32_t>(keys[1]), out, 1);
  }
};

// Where a sum starts, and where it goes: into the memory of the first input, if nobody else has it.
struct Sum {
  Sum(OpKernelContext *c, bool from_zero) {
    Tensor *total = nullptr;
    auto status = c->forward_input_or_allocate_output({0}, 0, c->input(0).shape(), &total);
    if (!status.ok()) {
      c->CtxFailure(status);
      return;
    }
    out = total->flat<float>().data();
    base = from_zero ? nullptr : Floats(c->input(0));
  }

  float *out = nullptr;
  const float *base = nullptr;
};

class AddLevels : public Levels {
 public:
  explicit AddLevels(OpKernelConstruction *c) : Levels(c) {
    OP_REQUIRES_OK(c, c->GetAttr("from_zero", &from_zero_));
  }

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), true)) return;
    const Tensor &packed = c->input(1), &scale = c->input(2), &weights = c->input(3);
    int64_t n = c->input(0).dim_size(0), ranks = weights.NumElements();
    if (!IsPacked(c, packed, ranks, n / 8 * bits_) ||
        !IsByRank(c, "scale", scale, ranks, groups_) || !Is(c, "weights", weights, {ranks}))
      return;
    Tensor words_copy, scale_copy;
    auto *words = static_cast<const uint32_t *>(Aligned(c, packed, &words_copy));
    auto *scales = static_cast<const float *>(Aligned(c, scale, &scale_copy));
    if (!c->status().ok()) return;
    Sum sum(c, from_zero_);
    if (sum.out)
      add_levels(bands_.data(), count(), sum.base, sum.out, n, ranks, words, packed.dim_size(1) / 4,
                 scales, scale.dim_size(1), bits_, Floats(weights), 1);
  }

 private:
  bool from_zero_ = false;
};

class EncodeSigns : public OverGroups {
 public:
  using OverGroups::OverGroups;

  void Compute(OpKernelContext *c) override {
    const Tensor &x = c->input(0);
    if (!Fits(c, x, true)) return;
    int64_t n = x.dim_size(0);
    float *above = NewFloats(c, 0, TensorShape({groups_}));
    float *below = NewFloats(c, 1, TensorShape({groups_}));
    uint32_t *words = NewWords(c, 2, n / 8);
    if (!c->status().ok()) return;
    int failed = encode_signs(bands_.data(), count(), Floats(x), n, above, below, words, 1);
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to compress a layer with"));
  }
};

class AddSigns : public OverGroups {
 public:
  explicit AddSigns(OpKernelConstruction *c) : OverGroups(c) {
    OP_REQUIRES_OK(c, c->GetAttr("from_zero", &from_zero_));
  }

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), true)) return;
    const Tensor &packed = c->input(1), &above = c->input(2), &below = c->input(3);
    const Tensor &weights = c->input(4);
    int64_t n = c->input(0).dim_size(0), ranks = weights.NumElements();
    if (!IsPacked(c, packed, ranks, n / 8) || !IsByRank(c, "above", above, ranks, groups_) ||
        !Is(c, "below", below, {ranks, above.dim_size(1)}) || !Is(c, "weights", weights, {ranks}))
      return;
    Tensor words_copy, above_copy, below_copy;
    auto *words = static_cast<const uint32_t *>(Aligned(c, packed, &words_copy));
    auto *highs = static_cast<const float *>(Aligned(c, above, &above_copy));
    auto *lows = static_cast<const float *>(Aligned(c, below, &below_copy));
    if (!c->status().ok()) return;
    Sum sum(c, from_zero_);
    if (sum.out)
      add_signs(bands_.data(), count(), sum.base, sum.out, n, ranks, words, packed.dim_size(1) / 4, highs,
                lows, above.dim_size(1), Floats(weights), 1);
  }

 private:
  bool from_zero_ = false;
};

class Climb : public OpKernel {
 public:
  explicit Climb(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("capacities", &capacities_));
    OP_REQUIRES_OK(c, c->GetAttr("patience", &patience_));
  }

  void Compute(OpKernelContext *c) override {
    int64_t state[5], top = static_cast<int64_t>(capacities_.size()), demand = 0;
    for (int i = 0; i < 5; i++) {
      OP_REQUIRES(c, c->input(i).dims() == 0, InvalidArgument("the state is five numbers"));
      state[i] = c->input(i).scalar<int64_t>()();
    }
    int64_t last = Within(state[0], top), calm = state[1], peak = Within(state[2], top);
    for (int64_t capacity : capacities_) demand += capacity < state[3];
    bool below = demand < last;
    calm = below ? calm + 1 : 0;
    peak = !below ? 0 : demand > peak ? demand : peak;
    bool rested = calm >= patience_;
    int64_t rung = rested ? peak : below ? last : demand;
    Set(c, 0, rung);
    Set(c, 1, rung < top ? capacities_[static_cast<size_t>(rung)] : 0);
    Set(c, 2, rung == top);
    Set(c, 3, rested ? 0 : calm);
    Set(c, 4, rested ? 0 : peak);
    Set(c, 5, state[4] + (rung != last));
  }

 private:
  static int64_t Within(int64_t rung, int64_t top) { return rung < 0 ? 0 : rung < top ? rung : top; }

  template <typename T>
  static void Set(OpKernelContext *c, int index, T number) {
    Tensor *out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(index, TensorShape({}), &out));
    out->scalar<T>()() = number;
  }

  std::vector<int64_t> capacities_;
  int64_t patience_ = 1;
};

// Base of what is done to a bucket of `size` elements, in which each layer begins with a block.
class OfBucket : public OpKernel {
 public:
  explicit OfBucket(OpKernelConstruction *c) : OpKernel(c) {
    int64_t bits = 0, size = 0, end = 0;
    OP_REQUIRES_OK(c, c->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(c, c->GetAttr("block_bits", &bits));
    OP_REQUIRES_OK(c, c->GetAttr("size", &size));
    OP_REQUIRES(c, !sizes_.empty() && 2 <= bits && bits < 31,
                InvalidArgument("a bucket has layers, and blocks of 4 to 2**30 elements"));
    OP_REQUIRES(c, 0 < size && size < int64_t{1} << 31 && size % (int64_t{1} << bits) == 0,
                InvalidArgument("a bucket is whole blocks, of fewer than 2**31 elements"));
    for (int64_t elements : sizes_) {
      OP_REQUIRES(c, 0 <= elements && elements < size - end,
                  InvalidArgument("the layers do not fit into ", size, " elements"));
      offsets_.push_back(end);
      end += ((elements + (int64_t{1} << bits) - 1) >> bits) << bits;
      layer_of_block_.resize(static_cast<size_t>(end >> bits),
                             static_cast<int64_t>(offsets_.size()) - 1);
    }
    int64_t layers = static_cast<int64_t>(sizes_.size());
    layer_of_block_.resize(static_cast<size_t>(size >> bits), layers - 1);  // the sink's too
    where_ = {layer_of_block_.data(), size, layers, static_cast<int32_t>(bits), 0};
  }

 protected:
  // Whether x is a vector of so many elements.
  bool Has(OpKernelContext *c, const char *what, const Tensor &x, int64_t elements) {
    if (x.dims() == 1 && x.dim_size(0) == elements) return true;
    c->CtxFailure(InvalidArgument(what, " is ", x.shape().DebugString(), ", expected [", elements,
                                  "]"));
    return false;
  }

  // The number that a scalar is, if it is not negative.
  bool Number(OpKernelContext *c, const char *what, const Tensor &x, int64_t *number) {
    if (x.dims() == 0 && (*number = x.scalar<int64_t>()()) >= 0) return true;
    c->CtxFailure(InvalidArgument(what, " is a number that is not negative"));
    return false;
  }

  // Bodies of all ranks, of so many bytes each.
  const uint8_t *Bodies(OpKernelContext *c, const Tensor &bodies, int64_t ranks, int64_t bytes,
                        Tensor *copy) {
    if (bodies.dims() == 2 && bodies.dim_size(0) == ranks && bodies.dim_size(1) == bytes)
      return static_cast<const uint8_t *>(Aligned(c, bodies, copy));
    c->CtxFailure(InvalidArgument("bodies are ", bodies.shape().DebugString(), ", expected [",
                                  ranks, ", ", bytes, "]"));
    return nullptr;
  }

  // The memory, the first inputs: before the step, and from output `first` on what it becomes.
  bool Memory(OpKernelContext *c, int fields, int first, const float **before, float **after) {
    for (int i = 0; i < fields; i++) {
      if (!Has(c, "memory", c->input(i), where_.size)) return false;
      Tensor *settled = nullptr;
      auto status =
          c->forward_input_or_allocate_output({i}, first + i, c->input(i).shape(), &settled);
      if (!status.ok()) {
        c->CtxFailure(status);
        return false;
      }
      before[i] = Floats(c->input(i));
      after[i] = settled->flat<float>().data();
    }
    return true;
  }

  std::vector<int64_t> sizes_, offsets_;
  place where_;

 private:
  std::vector<int64_t> layer_of_block_;
};

const char *const kBeyond =
    "assertion failed: hvd_gradcomp: an index points outside of its bucket: a payload is damaged";

// Base of what a rule for each element does.
class Words : public OfBucket {
 public:
  explicit Words(OpKernelConstruction *c) : OfBucket(c) {
    std::vector<float> numbers;
    OP_REQUIRES_OK(c, c->GetAttr("rule", &numbers));
    OP_REQUIRES(c, numbers.size() == 10,
                InvalidArgument("a rule is 10 numbers, not ", numbers.size()));
    auto flag = [&](int i) { return static_cast<int32_t>(numbers[i] != 0); };
    how_ = {flag(0),    flag(1),    flag(2),    flag(3),    flag(4),
            numbers[5], numbers[6], numbers[7], numbers[8], numbers[9]};
    OP_REQUIRES(c, !how_.powers || where_.size <= 1 << 28,
                InvalidArgument("with powers of two a bucket has at most 2**28 elements"));
    if (how_.powers) where_.side = static_cast<int32_t>((where_.layers + 3) / 4 * 4);
  }

 protected:
  // How many words fit, negative for places; and the bytes of a body with them.
  bool Room(OpKernelContext *c, const Tensor &capacity, int64_t *words, int64_t *bytes) {
    if (capacity.dims() != 0 || capacity.scalar<int64_t>()() > where_.size) {
      c->CtxFailure(InvalidArgument("capacity is a number of at most ", where_.size));
      return false;
    }
    *words = capacity.scalar<int64_t>()();
    int64_t places = how_.powers ? where_.size : where_.size / 4;
    *bytes = where_.side + (*words < 0 ? places : 4 * *words);
    return true;
  }

  rule how_;
};

class WriteWords : public Words {
 public:
  explicit WriteWords(OpKernelConstruction *c) : Words(c) {
    int fields = 0, moments = 0;
    OP_REQUIRES_OK(c, c->GetAttr("fields", &fields));
    OP_REQUIRES_OK(c, c->GetAttr("moments", &moments));
    int expected = how_.ambiguity ? 2 : 1;
    OP_REQUIRES(c, fields == expected && moments < expected,
                InvalidArgument("the rule has a memory of ", expected, " and not ", fields,
                                " tensors, and ", moments, " moments"));
    fields_ = fields;
    moments_ = moments;
  }

  void Compute(OpKernelContext *c) override {
    int at = fields_;  // of the inputs, behind the memory
    const Tensor &gradient = c->input(at++);
    const Tensor *moment = moments_ ? &c->input(at++) : nullptr;
    int64_t turn = 0, capacity = 0, bytes = 0;
    float *fields[2] = {nullptr, nullptr};
    const float *before[2] = {nullptr, nullptr};
    if (!Number(c, "turn", c->input(at++), &turn) || !Room(c, c->input(at), &capacity, &bytes) ||
        !Has(c, "gradient", gradient, where_.size) ||
        (moment && !Has(c, "moment", *moment, where_.size)) ||
        !Memory(c, fields_, 4, before, fields))
      return;
    Tensor *body = nullptr, *sent = nullptr, *wanted = nullptr, *per_layer = nullptr, room, tops;
    bool dense = capacity < 0, in_place = dense && how_.powers;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({bytes}), &body));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({}), &sent));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({}), &wanted));
    OP_REQUIRES_OK(c, c->allocate_output(3, TensorShape({where_.layers}), &per_layer));
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_INT32, TensorShape({where_.layers}), &tops));
    int64_t needed = in_place ? 0 : dense ? where_.size : 8 * where_.size;
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_UINT8, TensorShape({needed}), &room));

    uint8_t *out = body->flat<uint8_t>().data();
    uint8_t *flags = in_place ? out + where_.side : room.flat<uint8_t>().data();
    auto *found = reinterpret_cast<uint32_t *>(room.flat<uint8_t>().data());
    auto *layers = per_layer->flat<int64_t>().data();
    auto *top = tops.flat<int32_t>().data();
    float *r = fields[0], *v = fields[1];
    int64_t count = threshold_find(&how_, &where_, r, v, before[0], before[1], Floats(gradient),
                               moment ? Floats(*moment) : nullptr, dense ? nullptr : found,
                               dense ? flags : nullptr, top, 1);
    int64_t travel = -1;
    if (count >= 0 && dense) {
      count = travel = threshold_places(&how_, &where_, r, flags, top, out, layers, 1);
    } else if (count >= 0) {
      count = threshold_code(&how_, &where_, found, count, top, 1);
      if (count >= 0)
        travel = threshold_write(&how_, &where_, found, count, top, capacity, turn, v, out, layers);
    }
    OP_REQUIRES(c, travel >= 0, ResourceExhausted("no memory to compress a bucket with"));
    threshold_settle(&how_, &where_, out, dense ? -1 : travel, r, v, 1);
    sent->scalar<int64_t>()() = travel;
    wanted->scalar<int64_t>()() = count;
  }

 private:
  int fields_ = 0, moments_ = 0;
};

class AddWords : public Words {
 public:
  using Words::Words;

  void Compute(OpKernelContext *c) override {
    const Tensor &weights = c->input(2);
    int64_t capacity = 0, bytes = 0, ranks = weights.NumElements();
    Tensor copy;
    if (!Has(c, "room", c->input(0), where_.size) || !Room(c, c->input(3), &capacity, &bytes))
      return;
    const uint8_t *bodies = Bodies(c, c->input(1), ranks, bytes, &copy);
    if (!c->status().ok()) return;
    Sum sum(c, true);
    if (!sum.out) return;
    const float *by_rank = Floats(weights);
    if (capacity < 0)
      threshold_add_places(&how_, &where_, bodies, bytes, ranks, by_rank, sum.out, 1);
    else
      OP_REQUIRES(
          c, !threshold_add(&how_, &where_, bodies, bytes, ranks, capacity, by_rank, sum.out, 1),
          InvalidArgument(kBeyond));
  }
};

// Base of what has the body of a number of elements.
class Largest : public OfBucket {
 public:
  using OfBucket::OfBucket;

 protected:
  // Reads the form of a body, and its bytes: size, capacity and values of that struct in rules.py,
  // and its places. Whether they fit together, and there are values if they are needed.
  bool Form(OpKernelContext *c, const Tensor &given, bool needs_values, form *as, int64_t *bytes) {
    if (!Has(c, "form", given, 7)) return false;
    auto *n = given.flat<int64_t>().data();
    int64_t size = *bytes = n[0], most = 2 * where_.size;
    *as = {n[1], n[3], n[4], n[5], n[6], n[2]};
    bool valued = needs_values || as->values != size;
    auto fits = [&](int64_t first, int64_t items, int64_t each) {
      return 0 <= first && first % 4 == 0 && first <= size && 0 <= items && items <= most &&
             first + items * each <= size;
    };
    bool packed = as->blocks != 0;
    if (0 <= size && size % 4 == 0 && size < int64_t{1} << 40 &&
        as->capacity <= most && fits(as->values, valued ? as->capacity : 0, 4) &&
        fits(as->index, packed ? as->blocks : as->capacity, packed ? 1 : 4) &&
        fits(packed ? as->deltas : 0, packed ? as->room : 0, 4) &&
        (!packed || as->blocks == (as->capacity + kGroup - 1) / kGroup))
      return true;
    c->CtxFailure(InvalidArgument("the parts of the form do not fit together"));
    return false;
  }

  // Bytes of memory for the unpacked indices of so many bodies.
  static int64_t Unpacked(const form &as, int64_t bodies) {
    return 4 * kGroup * as.blocks * bodies;
  }
};

class WriteLargest : public Largest {
 public:
  explicit WriteLargest(OpKernelConstruction *c) : Largest(c) {
    bool nesterov = false, masking = false;
    OP_REQUIRES_OK(c, c->GetAttr("momentum", &how_.momentum));
    OP_REQUIRES_OK(c, c->GetAttr("nesterov", &nesterov));
    OP_REQUIRES_OK(c, c->GetAttr("masking", &masking));
    OP_REQUIRES_OK(c, c->GetAttr("looks", &looks_));
    OP_REQUIRES_OK(c, c->GetAttr("fields", &fields_));
    OP_REQUIRES_OK(c, c->GetAttr("whole", &whole_));
    OP_REQUIRES_OK(c, c->GetAttr("strides", &strides_));
    how_.nesterov = nesterov, how_.masking = masking;
    OP_REQUIRES(c, fields_ == (how_.momentum != 0 ? 2 : 1),
                InvalidArgument("a memory of ", fields_, " tensors for a momentum of ",
                                how_.momentum));
    OP_REQUIRES(c, strides_.size() == sizes_.size(), InvalidArgument("a stride for each layer"));
    for (int64_t stride : strides_)
      OP_REQUIRES(c, 0 < stride && stride <= where_.size, InvalidArgument("no such stride"));
    for (int64_t size : sizes_) elements_ += size;
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &gradient = c->input(fields_), &quota = c->input(fields_ + 1);
    const Tensor &slack = c->input(fields_ + 2), &hint = c->input(fields_ + 3);
    int64_t turn = 0, bytes = 0, groups = whole_ ? 1 : where_.layers;
    form as;
    float *fields[2] = {nullptr, nullptr};
    const float *before[2] = {nullptr, nullptr};
    if (!Number(c, "turn", c->input(fields_ + 4), &turn) || !Has(c, "quota", quota, groups) ||
        !Has(c, "slack", slack, groups) || !Has(c, "hint", hint, groups) ||
        !Form(c, c->input(fields_ + 5), false, &as, &bytes) ||
        !Has(c, "gradient", gradient, where_.size))
      return;
    if (looks_) {
      if (!Has(c, "r", c->input(0), where_.size)) return;
      before[0] = Floats(c->input(0));
      for (int i = 0; i < fields_; i++) c->set_output(4 + i, c->input(i));
    } else if (!Memory(c, fields_, 4, before, fields)) {
      return;
    }
    auto *k = quota.flat<int64_t>().data(), *more = slack.flat<int64_t>().data();
    for (int64_t i = 0; i < groups; i++)
      OP_REQUIRES(c, 0 <= k[i] && k[i] <= where_.size && 0 <= more[i] && more[i] <= INT32_MAX,
                  InvalidArgument("quota and slack are numbers of elements"));
    Tensor *body = nullptr, *sent = nullptr, *per_layer = nullptr, *next = nullptr, counts, room;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({bytes}), &body));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({}), &sent));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({where_.layers}), &per_layer));
    OP_REQUIRES_OK(c, c->allocate_output(3, TensorShape({groups}), &next));
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_INT64, TensorShape({groups}), &counts));
    int64_t needed = 8 * where_.size + Unpacked(as, 1);
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_UINT8, TensorShape({needed}), &room));

    auto *index = reinterpret_cast<uint32_t *>(room.flat<uint8_t>().data());
    uint32_t *bits = index + where_.size, *scratch = bits + where_.size;
    elements found = {index, bits, counts.flat<int64_t>().data()};
    scope of = {where_,    offsets_.data(), sizes_.data(), strides_.data(),
                elements_, static_cast<int32_t>(whole_)};
    uint8_t *out = body->flat<uint8_t>().data();
    float *r = fields[0], *u = fields[1], *then = next->flat<float>().data();
    const float *g = Floats(gradient), *look = looks_ ? before[0] : r;
    int failed = topk_find(&how_, &of, r, u, before[0], before[1], g, k, more, Floats(hint),
                              &found, 1);
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to compress a bucket with"));
    topk_again(&of, look, looks_ ? g : nullptr, k, more, &found, 1);
    int64_t chosen = topk_choose(&of, turn, k, &found, then, 1);
    int64_t *layers = per_layer->flat<int64_t>().data(), total = 0;
    topk_write(&of, &as, &found, chosen, turn, scratch, out, bytes, layers, 1);
    if (!looks_) topk_settle(&how_, &where_, &as, out, scratch, r, u, 1);
    for (int64_t i = 0; i < where_.layers; i++) total += layers[i];
    sent->scalar<int64_t>()() = total;
  }

 private:
  collecting how_ = {};
  std::vector<int64_t> strides_;
  int64_t elements_ = 0;
  int fields_ = 0;
  bool whole_ = false, looks_ = false;
};

class AddLargest : public Largest {
 public:
  using Largest::Largest;

  void Compute(OpKernelContext *c) override {
    const Tensor &weights = c->input(2);
    int64_t ranks = weights.NumElements(), bytes = 0;
    form as;
    Tensor copy, scratch;
    if (!Has(c, "room", c->input(0), where_.size) || !Form(c, c->input(3), true, &as, &bytes)) return;
    const uint8_t *bodies = Bodies(c, c->input(1), ranks, bytes, &copy);
    if (!c->status().ok()) return;
    OP_REQUIRES_OK(
        c, c->allocate_temp(tensorflow::DT_UINT8, TensorShape({Unpacked(as, ranks)}), &scratch));
    Sum sum(c, true);
    if (!sum.out) return;
    int failed = topk_add(&where_, &as, bodies, bytes, ranks, Floats(weights),
                             reinterpret_cast<uint32_t *>(scratch.flat<uint8_t>().data()), sum.out,
                             1);
    OP_REQUIRES(c, failed != BEYOND, InvalidArgument(kBeyond));
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to decompress a bucket with"));
  }
};

// Base of what reads a body of places that one rank has chosen for all.
class Chosen : public Largest {
 public:
  using Largest::Largest;

 protected:
  // The inputs that all have: r, the gradient, the body, and its form at `form_at`.
  const uint8_t *Body(OpKernelContext *c, int form_at, form *as, Tensor *copy, Tensor *scratch) {
    int64_t bytes = 0;
    if (!Has(c, "r", c->input(0), where_.size) || !Has(c, "gradient", c->input(1), where_.size) ||
        !Form(c, c->input(form_at), false, as, &bytes) || !Has(c, "body", c->input(2), bytes))
      return nullptr;
    int64_t room = Unpacked(*as, 1) + 4 * as->capacity;
    auto status = c->allocate_temp(tensorflow::DT_UINT8, TensorShape({room}), scratch);
    if (status.ok()) return static_cast<const uint8_t *>(Aligned(c, c->input(2), copy));
    c->CtxFailure(status);
    return nullptr;
  }
};

class ReadChosen : public Chosen {
 public:
  using Chosen::Chosen;

  void Compute(OpKernelContext *c) override {
    form as;
    Tensor copy, scratch;
    const uint8_t *body = Body(c, 3, &as, &copy, &scratch);
    if (!c->status().ok()) return;
    float *values = NewFloats(c, 0, TensorShape({as.capacity}));
    if (!values) return;
    auto *room = reinterpret_cast<uint32_t *>(scratch.flat<uint8_t>().data());
    int failed = topk_values(&where_, &as, body, room, Floats(c->input(0)), Floats(c->input(1)),
                                values, 1);
    OP_REQUIRES(c, !failed, InvalidArgument(kBeyond));
  }
};

class ReplaceChosen : public Chosen {
 public:
  explicit ReplaceChosen(OpKernelConstruction *c) : Chosen(c) {
    OP_REQUIRES_OK(c, c->GetAttr("beta", &beta_));
    OP_REQUIRES_OK(c, c->GetAttr("keeps", &keeps_));
  }

  void Compute(OpKernelContext *c) override {
    form as;
    Tensor copy, scratch, *mean = nullptr, *after = nullptr, *per_layer = nullptr;
    const uint8_t *body = Body(c, 4, &as, &copy, &scratch);
    if (!c->status().ok() || !Has(c, "total", c->input(3), as.capacity)) return;
    const Tensor &r = c->input(0), &gradient = c->input(1);
    OP_REQUIRES_OK(c, c->forward_input_or_allocate_output({1}, 0, gradient.shape(), &mean));
    OP_REQUIRES_OK(c, c->forward_input_or_allocate_output({0}, 1, r.shape(), &after));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({where_.layers}), &per_layer));
    int failed = topk_replace(&where_, &as, body, Floats(c->input(3)), beta_, keeps_,
                                 reinterpret_cast<uint32_t *>(scratch.flat<uint8_t>().data()),
                                 after->flat<float>().data(), Floats(r), mean->flat<float>().data(),
                                 Floats(gradient), per_layer->flat<int64_t>().data(), 1);
    OP_REQUIRES(c, !failed, InvalidArgument(kBeyond));
  }

 private:
  float beta_ = 1.0f, keeps_ = 0.0f;
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
    float *out = NewFloats(c, 0, TensorShape({size_}));
    if (!out) return;
    int64_t end = 0;
    for (int i = 0; i < c->num_inputs(); i++) {
      int64_t count = c->input(i).NumElements();
      if (!Fits(c, i, count, size_)) return;
      std::memset(out + end, 0, sizeof(float) * static_cast<size_t>(offsets_[i] - end));
      Copy(i, Floats(c->input(i)), out + offsets_[i]);
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
        float *out = NewFloats(c, i, shapes_[i]);
        if (!out) return;
        Copy(i, Floats(flat) + offsets_[i], out);
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

#define ON_CPU(kernel) \
  REGISTER_KERNEL_BUILDER(Name("Gradcomp" #kernel).Device(DEVICE_CPU), kernel)
ON_CPU(BitPlanes);
ON_CPU(FromBitPlanes);
ON_CPU(WeightedSum);
ON_CPU(Finite);
ON_CPU(Accumulate);
ON_CPU(Frame);
ON_CPU(Examine);
ON_CPU(Key);
ON_CPU(GroupMaxima);
ON_CPU(GroupSquares);
ON_CPU(LayerHistograms);
ON_CPU(EncodeLevels);
ON_CPU(AddLevels);
ON_CPU(EncodeSigns);
ON_CPU(AddSigns);
ON_CPU(Climb);
ON_CPU(WriteWords);
ON_CPU(AddWords);
ON_CPU(WriteLargest);
ON_CPU(AddLargest);
ON_CPU(ReadChosen);
ON_CPU(ReplaceChosen);
ON_CPU(Flatten);
ON_CPU(Cut);

}  // namespace
