// The functions of native.c and words.c as operations of TensorFlow, for tensors on a CPU.
//
// They shadow composites of ops/composites.py and give the same bits. Shapes are checked here, before
// C walks over memory: whatever tensors come, the worst is an InvalidArgumentError. ops/tensorflow.py
// calls them; ops/building.py compiles and links all three into one library. An operation has one
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
struct band {
  int64_t start, rows, length;
};
void bit_planes(const int64_t *groups, int64_t m, int bits, int64_t *planes);
void from_bit_planes(const int64_t *planes, int64_t m, int bits, int64_t *groups);
uint32_t weighted_sum(const uint32_t *words, int64_t n);
void group_maxima(const band *bands, int64_t count, const float *x, float *out);
int group_squares(const band *bands, int64_t count, const float *x, float *out);
void encode_levels(const band *bands, int64_t count, const float *x, int64_t n, const float *scale,
                   int bits, uint32_t key1, uint32_t key2, uint32_t *words);
void add_levels(const band *bands, int64_t count, const float *base, float *out, int64_t n,
                int64_t ranks, const uint32_t *words, int64_t word_stride, const float *scale,
                int64_t scale_stride, int bits, const float *weights);
int encode_signs(const band *bands, int64_t count, const float *x, int64_t n, float *above,
                 float *below, uint32_t *words);
void add_signs(const band *bands, int64_t count, const float *base, float *out, int64_t n,
               int64_t ranks, const uint32_t *words, int64_t word_stride, const float *above,
               const float *below, int64_t mean_stride, const float *weights);

typedef struct {
  int32_t ambiguity, large, powers, subtracts, corrects;
  float alpha, tau, zeta, twice_tau, tau_squared;
} rule;
typedef struct {
  const int64_t *layer_of_block;
  int64_t size, layers;
  int32_t block_bits, side;
} place;
int64_t words_find(const rule *how, const place *where, float *r, float *v, const float *r0,
                   const float *v0, const float *g, const float *q, uint32_t *found, uint8_t *flags,
                   int32_t *top, int threads);
int64_t words_code(const rule *how, const place *where, const float *r, uint32_t *found,
                   int64_t count, const int32_t *top, int threads);
int64_t words_write(const rule *how, const place *where, const uint32_t *words, int64_t count,
                    const int32_t *top, int64_t capacity, int64_t turn, float *v, uint8_t *body,
                    int64_t *sent);
int64_t words_places(const rule *how, const place *where, const float *r, uint8_t *flags,
                     const int32_t *top, uint8_t *body, int64_t *sent, int threads);
void words_settle(const rule *how, const place *where, const uint8_t *body, int64_t count, float *r,
                  float *v, int threads);
int words_add(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
              int64_t ranks, int64_t capacity, const float *weights, float *room, int threads);
void words_add_places(const rule *how, const place *where, const uint8_t *bodies, int64_t stride,
                      int64_t ranks, const float *weights, float *room, int threads);
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

// Words, and places where `capacity` is negative. `rule` is the numbers of that struct, `blocks` how
// many blocks of 2 ** block_bits elements each layer has.
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
    .Attr("blocks: list(int)")
    .Attr("block_bits: int >= 0")
    .SHAPE(std::vector<int64_t> blocks; (void)c->GetAttr("blocks", &blocks).ok();
           c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
           c->set_output(1, c->Scalar()); c->set_output(2, c->Scalar());
           c->set_output(3, c->Vector(static_cast<int64_t>(blocks.size())));
           for (int i = 4; i < c->num_outputs(); i++) c->set_output(i, c->input(i - 4)));

REGISTER_OP("GradcompAddWords")
    .Input("room: float")
    .Input("bodies: uint8")
    .Input("weights: float")
    .Input("capacity: int64")
    .Output("total: float")
    .Attr("rule: list(float)")
    .Attr("blocks: list(int)")
    .Attr("block_bits: int >= 0")
    .SHAPE(c->set_output(0, c->input(0)));

// Pieces of a vector to and from the tensors that they are; zeros between them.
REGISTER_OP("GradcompFlatten")
    .Input("pieces: count * float")
    .Output("flat: float")
    .Attr("count: int >= 1")
    .Attr("offsets: list(int)")
    .Attr("size: int >= 1")
    .SHAPE(int64_t size = 0; (void)c->GetAttr("size", &size).ok();
           c->set_output(0, c->Vector(size)));

REGISTER_OP("GradcompCut")
    .Input("flat: float")
    .Output("pieces: count * float")
    .Attr("count: int >= 1")
    .Attr("offsets: list(int)")
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
      out[row] = weighted_sum(from + row * words, words);
  }
};

// The weighted sum of a frame's words, and of its body.
uint32_t Checksum(const uint32_t *words, int64_t count, const uint32_t *body, int64_t n) {
  uint32_t sum = weighted_sum(body, n);
  for (int64_t i = 0; i < count; i++) sum += words[i] * static_cast<uint32_t>(2 * i + 1);
  return sum;
}

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
    out[count] = Checksum(out, count, behind, bytes / 4);
  }
};

class Examine : public OpKernel {
 public:
  explicit Examine(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("count", &count_));
    OP_REQUIRES_OK(c, c->GetAttr("fields", &fields_));
    OP_REQUIRES(c, fields_.size() % 3 == 0, InvalidArgument("a field is three numbers"));
    for (size_t i = 0; i < fields_.size(); i += 3) {
      int64_t word = fields_[i], low = fields_[i + 1], bits = fields_[i + 2];
      OP_REQUIRES(c,
                  0 <= word && word < count_ && 0 <= low && low < 32 && 0 < bits && bits <= 32,
                  InvalidArgument("a field is a word, a lowest bit and bits, not ", word, ", ", low,
                                  ", ", bits));
    }
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &frames = c->input(0), &expected = c->input(1);
    int64_t fields = static_cast<int64_t>(fields_.size() / 3);
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
    bool *flags = held->flat<bool>().data();
    auto *numbers = expected.flat<int64_t>().data();
    for (int64_t row = 0; row < rows; row++, from += length, words += count_) {
      const uint32_t *body = from + count_ + 1;
      for (int64_t i = 0; i < count_; i++) words[i] = from[i];
      flags[row] = from[count_] == Checksum(from, count_, body, length - count_ - 1);
      for (int64_t i = 0; i < fields; i++) {
        int64_t shifted = words[fields_[3 * i]] >> fields_[3 * i + 1];
        int64_t number = shifted & ((int64_t{1} << fields_[3 * i + 2]) - 1);
        flags[(i + 1) * rows + row] = number == numbers[i];
      }
    }
  }

 private:
  int64_t count_ = 0;
  std::vector<int64_t> fields_;
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
    if (out) group_maxima(bands_.data(), count(), Floats(c->input(0)), out);
  }
};

class GroupSquares : public OverGroups {
 public:
  using OverGroups::OverGroups;

  void Compute(OpKernelContext *c) override {
    if (!Fits(c, c->input(0), false)) return;
    float *out = NewFloats(c, 0, TensorShape({groups_}));
    if (!out) return;
    int failed = group_squares(bands_.data(), count(), Floats(c->input(0)), out);
    OP_REQUIRES(c, !failed, ResourceExhausted("no memory to compress a layer with"));
  }
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
                    static_cast<uint32_t>(keys[0]), static_cast<uint32_t>(keys[1]), out);
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
                 scales, scale.dim_size(1), bits_, Floats(weights));
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
    int failed = encode_signs(bands_.data(), count(), Floats(x), n, above, below, words);
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
                lows, above.dim_size(1), Floats(weights));
  }

 private:
  bool from_zero_ = false;
};

// Base of what a rule for each element does to a bucket.
class Words : public OpKernel {
 public:
  explicit Words(OpKernelConstruction *c) : OpKernel(c) {
    std::vector<float> numbers;
    std::vector<int64_t> blocks;
    int64_t bits = 0;
    OP_REQUIRES_OK(c, c->GetAttr("rule", &numbers));
    OP_REQUIRES_OK(c, c->GetAttr("blocks", &blocks));
    OP_REQUIRES_OK(c, c->GetAttr("block_bits", &bits));
    OP_REQUIRES(c, numbers.size() == 10,
                InvalidArgument("a rule is 10 numbers, not ", numbers.size()));
    OP_REQUIRES(c, !blocks.empty() && 2 <= bits && bits < 31,
                InvalidArgument("a bucket has layers, and blocks of 4 to 2**30 elements"));
    auto flag = [&](int i) { return static_cast<int32_t>(numbers[i] != 0); };
    how_ = {flag(0),    flag(1),    flag(2),    flag(3),    flag(4),
            numbers[5], numbers[6], numbers[7], numbers[8], numbers[9]};
    int64_t layers = static_cast<int64_t>(blocks.size());
    int64_t most = int64_t{1} << ((how_.powers ? 28 : 31) - bits), count = 0;
    for (int64_t layer = 0; layer < layers; layer++) {
      OP_REQUIRES(c, 0 <= blocks[layer] && blocks[layer] <= most - count,
                  InvalidArgument("a bucket has at most ", most, " blocks"));
      count += blocks[layer];
      layer_of_block_.insert(layer_of_block_.end(), static_cast<size_t>(blocks[layer]), layer);
    }
    OP_REQUIRES(c, count > 0, InvalidArgument("a bucket has at least one block"));
    int32_t side = how_.powers ? static_cast<int32_t>((layers + 3) / 4 * 4) : 0;
    where_ = {layer_of_block_.data(), count << bits, layers, static_cast<int32_t>(bits), side};
  }

 protected:
  // Whether x is a vector of the whole bucket.
  bool IsBucket(OpKernelContext *c, const char *what, const Tensor &x) {
    if (x.dims() == 1 && x.dim_size(0) == where_.size) return true;
    c->CtxFailure(InvalidArgument(what, " is ", x.shape().DebugString(), ", expected [",
                                  where_.size, "]"));
    return false;
  }

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
  place where_;

 private:
  std::vector<int64_t> layer_of_block_;
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
    const Tensor &turn = c->input(at++);
    int64_t capacity = 0, bytes = 0;
    if (!IsBucket(c, "gradient", gradient) || !Room(c, c->input(at), &capacity, &bytes)) return;
    if (moment && !IsBucket(c, "moment", *moment)) return;
    OP_REQUIRES(c, turn.dims() == 0 && turn.scalar<int64_t>()() >= 0,
                InvalidArgument("turn is a number that is not negative"));
    float *fields[2] = {nullptr, nullptr};
    const float *before[2] = {nullptr, nullptr};
    for (int i = 0; i < fields_; i++) {
      if (!IsBucket(c, "memory", c->input(i))) return;
      Tensor *settled = nullptr;
      OP_REQUIRES_OK(c, c->forward_input_or_allocate_output({i}, 4 + i, c->input(i).shape(),
                                                            &settled));
      before[i] = Floats(c->input(i));
      fields[i] = settled->flat<float>().data();
    }
    Tensor *body = nullptr, *sent = nullptr, *wanted = nullptr, *per_layer = nullptr, room, tops;
    bool dense = capacity < 0, in_place = dense && how_.powers;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({bytes}), &body));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({}), &sent));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({}), &wanted));
    OP_REQUIRES_OK(c, c->allocate_output(3, TensorShape({where_.layers}), &per_layer));
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_INT32, TensorShape({where_.layers}), &tops));
    int64_t needed = in_place ? 0 : dense ? where_.size : 4 * where_.size;
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_UINT8, TensorShape({needed}), &room));

    uint8_t *out = body->flat<uint8_t>().data();
    uint8_t *flags = in_place ? out + where_.side : room.flat<uint8_t>().data();
    auto *found = reinterpret_cast<uint32_t *>(room.flat<uint8_t>().data());
    auto *layers = per_layer->flat<int64_t>().data();
    auto *top = tops.flat<int32_t>().data();
    float *r = fields[0], *v = fields[1];
    int64_t count = words_find(&how_, &where_, r, v, before[0], before[1], Floats(gradient),
                               moment ? Floats(*moment) : nullptr, dense ? nullptr : found,
                               dense ? flags : nullptr, top, 1);
    int64_t travel = -1;
    if (count >= 0 && dense) {
      count = travel = words_places(&how_, &where_, r, flags, top, out, layers, 1);
    } else if (count >= 0) {
      count = words_code(&how_, &where_, r, found, count, top, 1);
      if (count >= 0)
        travel = words_write(&how_, &where_, found, count, top, capacity,
                             turn.scalar<int64_t>()(), v, out, layers);
    }
    OP_REQUIRES(c, travel >= 0, ResourceExhausted("no memory to compress a bucket with"));
    words_settle(&how_, &where_, out, dense ? -1 : travel, r, v, 1);
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
    const Tensor &bodies = c->input(1), &weights = c->input(2);
    int64_t capacity = 0, bytes = 0, ranks = weights.NumElements();
    if (!IsBucket(c, "room", c->input(0)) || !Room(c, c->input(3), &capacity, &bytes)) return;
    OP_REQUIRES(c,
                bodies.dims() == 2 && bodies.dim_size(0) == ranks && bodies.dim_size(1) == bytes,
                InvalidArgument("bodies are ", bodies.shape().DebugString(), ", expected [", ranks,
                                ", ", bytes, "]"));
    Tensor copy;
    auto *from = static_cast<const uint8_t *>(Aligned(c, bodies, &copy));
    if (!c->status().ok()) return;
    Sum sum(c, true);
    if (!sum.out) return;
    const float *by_rank = Floats(weights);
    if (capacity < 0)
      words_add_places(&how_, &where_, from, bytes, ranks, by_rank, sum.out, 1);
    else
      OP_REQUIRES(
          c, !words_add(&how_, &where_, from, bytes, ranks, capacity, by_rank, sum.out, 1),
          InvalidArgument("assertion failed: hvd_gradcomp: an index points outside of its bucket: "
                          "a payload is damaged"));
  }
};

// Base of what lies in a vector in pieces: in order, none over another.
class InPieces : public OpKernel {
 public:
  explicit InPieces(OpKernelConstruction *c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("offsets", &offsets_));
  }

 protected:
  // Whether a piece of so many elements fits before the next one, or before the end.
  bool Fits(OpKernelContext *c, size_t piece, int64_t elements, int64_t size) {
    int64_t start = piece < offsets_.size() ? offsets_[piece] : size + 1;
    int64_t next = piece + 1 < offsets_.size() ? offsets_[piece + 1] : size;
    if (0 <= start && start <= next && next <= size && elements <= next - start) return true;
    c->CtxFailure(InvalidArgument("piece ", piece, " of ", elements, " elements does not fit"));
    return false;
  }

  std::vector<int64_t> offsets_;
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
      std::memcpy(out + offsets_[i], Floats(c->input(i)), sizeof(float) * count);
      end = offsets_[i] + count;
    }
    std::memset(out + end, 0, sizeof(float) * static_cast<size_t>(size_ - end));
  }

 private:
  int64_t size_ = 0;
};

// What the pieces hold stays where it is, if it is aligned there.
class Cut : public InPieces {
 public:
  explicit Cut(OpKernelConstruction *c) : InPieces(c) {
    OP_REQUIRES_OK(c, c->GetAttr("shapes", &shapes_));
  }

  void Compute(OpKernelContext *c) override {
    const Tensor &flat = c->input(0);
    OP_REQUIRES(c, flat.dims() == 1 && shapes_.size() == static_cast<size_t>(c->num_outputs()),
                InvalidArgument("a vector is cut into as many pieces as there are shapes"));
    for (size_t i = 0; i < shapes_.size(); i++) {
      int64_t count = shapes_[i].num_elements();
      if (!Fits(c, i, count, flat.dim_size(0))) return;
      Tensor piece = flat.Slice(offsets_[i], offsets_[i] + count), shaped;
      if (!piece.IsAligned()) piece = tensorflow::tensor::DeepCopy(piece);
      OP_REQUIRES(c, shaped.CopyFrom(piece, shapes_[i]), InvalidArgument("no such shape"));
      c->set_output(static_cast<int>(i), shaped);
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
ON_CPU(Frame);
ON_CPU(Examine);
ON_CPU(Key);
ON_CPU(GroupMaxima);
ON_CPU(GroupSquares);
ON_CPU(EncodeLevels);
ON_CPU(AddLevels);
ON_CPU(EncodeSigns);
ON_CPU(AddSigns);
ON_CPU(WriteWords);
ON_CPU(AddWords);
ON_CPU(Flatten);
ON_CPU(Cut);

}  // namespace
