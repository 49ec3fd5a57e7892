#include "tensor/tensor.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/breaks.h"
#include "base/fingerprint.h"
#include "base/os.h"
#include "rule/bounded.h"
#include "rule/schedule.h"

namespace windlass {
namespace {

// How many numbers are converted at once.
constexpr uint64_t kBlockElements = 1024;

// Keeps arrays off power-of-two distances.
constexpr uint64_t kStagger = 64 * 67;

// The shortest text that reads back as the same number.
template <class T>
std::string text_of(T x) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x).ptr;
  return std::string(buffer, end);
}

uint64_t round_up(uint64_t bytes) { return (bytes + 63) & ~uint64_t{63}; }

}  // namespace

Status changed_on_loan(const std::string& what, uint32_t shard, bool any) {
  const std::string where = "shard " + std::to_string(shard);
  return any ? Status(Code::kBufferInUse, what + " was changed while it was on loan, and has NaN or infinity by now; " +
                                              where + " got a part of it")
             : Status(Code::kNonFinite, what + " has NaN or infinity; nothing was applied to " + where);
}

uint64_t TensorSpec::elements() const {
  uint64_t n = 1;
  for (const uint64_t d : shape) n *= d;
  return n;
}

uint64_t TensorSpec::row() const {
  uint64_t n = 1;
  for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
  return n;
}

Cut cut_of(const TensorSpec& spec) {
  if (spec.rule.foreign.whole) return Cut::whole(spec.elements(), spec.row());
  return Cut::of(spec.elements(), spec.row(), size_of(spec.dtype));
}

std::string describe_shape(const uint64_t* shape, size_t dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims; ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (dims == 1 ? ",)" : ")");
}

// As Python writes it, without what is at its default.
std::string describe(const Schedule& s) {
  static constexpr const char* kDecays[] = {nullptr, "linear", "cosine", "inverse_root", "steps"};
  std::string text = "warmup=" + std::to_string(s.warmup);
  if (s.kind < Schedule::kKinds && kDecays[s.kind] != nullptr) {
    text += std::string(", decay='") + kDecays[s.kind] + "', updates=" + std::to_string(s.updates);
    text += (s.kind == Schedule::kSteps ? ", factor=" : ", end=") + text_of(s.end);
  }
  return "Schedule(" + text + ")";
}

std::string describe(const RuleSpec& rule) {
  std::string text = rule.kind == RuleKind::kForeign ? "rule '" + rule.foreign.name + "'" : name_of(rule.kind);
  std::string options;
  const auto add = [&](const char* name, const std::string& value) {
    options += (options.empty() ? "" : ", ") + std::string(name) + "=" + value;
  };
  if (rule.initial_state != 0.0f) add("initial_accumulator_value", text_of(rule.initial_state));
  if (rule.clip != 0.0f) add("clip_value", text_of(rule.clip));
  if (Bounds::any({.kind = rule.kind, .lowest = rule.lowest, .highest = rule.highest}))
    add("clip_weights", "(" + text_of(rule.lowest) + ", " + text_of(rule.highest) + ")");
  if (scheduled(rule)) add("schedule", describe(rule.schedule));
  return options.empty() ? text : text + "(" + options + ")";
}

std::string describe(const Init& init) {
  switch (init.kind) {
    case InitKind::kZeros: return "Zeros()";
    case InitKind::kConstant: return "Constant(" + text_of(init.a) + ")";
    case InitKind::kUniform: return "Uniform(" + text_of(init.a) + ", " + text_of(init.b) + ")";
    case InitKind::kNormal: return "Normal(mean=" + text_of(init.a) + ", std=" + text_of(init.b) + ")";
  }
  return "?";
}

std::string describe(const TensorSpec& s) {
  return "tensor(shape=" + describe_shape(s.shape.data(), s.shape.size()) + ", dtype=" + name_of(s.dtype) +
         ", rule=" + describe(s.rule) + ", init=" + describe(s.init) + ", seed=" + std::to_string(s.seed) +
         ", reject_nonfinite=" + (s.reject_nonfinite ? "True" : "False") + ", sync=" + describe(s.sync) +
         (s.like.empty() ? "" : ", like='" + s.like + "'") + ")";
}

Tensor::Tensor(std::string name, TensorSpec spec, const Cut& cut, Budget* budget, Run run)
    : name_(std::move(name)),
      spec_(std::move(spec)),
      cut_(cut),
      run_{std::min(run.first, cut.shards), std::min(run.end, cut.shards)},
      first_(cut.first_of(run_.first)),
      budget_(budget) {}

Tensor::~Tensor() { give_memory(); }

std::unique_ptr<Tensor> Tensor::make_empty(const std::string& name, const TensorSpec& spec, const Cut& cut,
                                           Budget* budget, Run run) {
  std::unique_ptr<Tensor> t(new Tensor(name, spec, cut, budget, run));
  if (t->run_.first < t->run_.end) t->shards_ = std::make_unique<Shard[]>(t->run_.end - t->run_.first);
  return t;
}

// One mapping: weights, then each state array, each a little further off a round distance.
Status Tensor::take_memory() {
  const Layout layout = layout_of(spec_.rule);
  const uint64_t vector_bytes = round_up(elements() * 4);
  uint64_t bytes = round_up(elements() * size_of(spec_.dtype));
  uint64_t vector_at[limits::kForeignVectorsMax] = {};
  for (int v = 0; v < layout.vectors; ++v) {
    vector_at[v] = bytes + kStagger * static_cast<uint64_t>(v + 1);
    bytes = vector_at[v] + vector_bytes;
  }
  const uint64_t scalars_at = bytes;
  if (layout.row_scalars != 0) bytes += round_up(rows() * layout.row_scalars * 4);
  const uint64_t shard_scalars_at = bytes;
  bytes += round_up((run_.end - run_.first) * uint64_t{layout.shard_scalars} * 4);
  if (!budget_->charge(bytes)) return budget_->exhausted(bytes, "tensor '" + name_ + "'");
  memory_ = os::map(bytes);
  if (memory_ == nullptr) {
    budget_->refund(bytes);
    return budget_->exhausted(bytes, "tensor '" + name_ + "'");
  }
  bytes_ = bytes;
  weights_ = memory_;
  for (int v = 0; v < layout.vectors; ++v) state_[v] = reinterpret_cast<float*>(memory_ + vector_at[v]);
  if (layout.row_scalars != 0) scalars_ = reinterpret_cast<float*>(memory_ + scalars_at);
  if (layout.shard_scalars != 0) shard_scalars_ = reinterpret_cast<float*>(memory_ + shard_scalars_at);
  return {};
}

void Tensor::give_memory() {
  os::unmap(memory_, bytes_);
  budget_->refund(bytes_);
  memory_ = weights_ = nullptr;
  bytes_ = 0;
}

Status check_like(const std::string& name, const TensorSpec& spec, const TensorSpec* anchor) {
  const std::string what = "tensor '" + name + "': like '" + spec.like + "': ";
  if (anchor == nullptr) return Status(Code::kNotFound, what + "there is no such tensor");
  if (!anchor->like.empty())
    return Status(Code::kInvalidArgument,
                  what + "that one is like '" + anchor->like + "' itself, which is to be named");
  const uint32_t shards = cut_of(spec).shards, theirs = cut_of(*anchor).shards;
  if (anchor->shape == spec.shape && anchor->dtype == spec.dtype && shards == theirs) return {};
  const auto form = [&](const TensorSpec& s) {  // a rule may want all of a tensor in one shard
    const std::string cut = shards != theirs ? " in " + std::to_string(cut_of(s).shards) + " shards" : "";
    return std::string(name_of(s.dtype)) + describe_shape(s.shape.data(), s.shape.size()) + cut;
  };
  return Status(Code::kInvalidArgument, what + "expected " + form(*anchor) + ", saw " + form(spec));
}

Status check_spec(const std::string& name, const TensorSpec& spec, Cut* cut) {
  const Layout layout = layout_of(spec.rule);
  WL_RETURN_IF_ERROR(check_sync("tensor '" + name + "'", spec.sync));
  WL_RETURN_IF_ERROR(check_rule("tensor '" + name + "'", spec.rule));
  if (!storable(spec.dtype)) {
    return Status(Code::kInvalidArgument,
                  "tensor '" + name + "': dtype must be float32, float64 or int64, not " + name_of(spec.dtype));
  }
  if (spec.dtype != Dtype::kFloat32 && !layout.any_dtype) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': rule " + name_of(spec.rule.kind) +
                                              " works on float32, not " + name_of(spec.dtype) +
                                              "; Sum, Max, Min and Assign take any dtype");
  }
  if (spec.dtype != Dtype::kFloat32 && Bounds::any(spec.rule)) {
    return Status(Code::kInvalidArgument,
                  "tensor '" + name + "': clip_value and clip_weights are for float32, not " + name_of(spec.dtype));
  }
  if (spec.dtype != Dtype::kFloat32 && spec.init.kind != InitKind::kZeros && spec.init.kind != InitKind::kConstant) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': init " + describe(spec.init) + " is for float32; a " +
                                              name_of(spec.dtype) + " tensor starts with Zeros or Constant");
  }
  if (spec.dtype == Dtype::kInt64 && spec.init.kind == InitKind::kConstant &&
      !(spec.init.a >= -0x1p63 && spec.init.a < 0x1p63)) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': init " + describe(spec.init) + " is not an int64");
  }
  if (spec.shape.size() > limits::kTensorDimsMax) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': at most " + std::to_string(limits::kTensorDimsMax) +
                                              " dimensions, not " + std::to_string(spec.shape.size()));
  }
  uint64_t elements = 1;
  for (const uint64_t d : spec.shape) {
    if (d == 0) {
      elements = 0;
      break;
    }
    if (elements > limits::kTensorElementsMax / d) {
      return Status(Code::kInvalidArgument, "tensor '" + name + "': shape " +
                                                describe_shape(spec.shape.data(), spec.shape.size()) +
                                                " has more than 2^40 elements");
    }
    elements *= d;
  }
  *cut = cut_of(spec);
  if (spec.rule.foreign.whole && elements > limits::kWholeBytesMax / sizeof(float)) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': " + describe(spec.rule) +
                                              " needs all of it in one shard, of at most " +
                                              std::to_string(limits::kWholeBytesMax) + " bytes, not " +
                                              std::to_string(elements * sizeof(float)));
  }
  if ((layout.row_scalars != 0 || layout.by_row) && !cut->whole_rows) {
    return Status(Code::kInvalidArgument, "tensor '" + name + "': rule " + describe(spec.rule) +
                                              " needs rows of at most " + std::to_string(limits::kShardBytesMax) +
                                              " bytes, not " + std::to_string(cut->row * 4));
  }
  return {};
}

Status Tensor::create(const std::string& name, const TensorSpec& spec, Budget* budget, std::unique_ptr<Tensor>* out,
                      Run run) {
  Cut cut;
  WL_RETURN_IF_ERROR(check_spec(name, spec, &cut));
  std::unique_ptr<Tensor> t = make_empty(name, spec, cut, budget, run);
  const Layout layout = layout_of(spec.rule);
  const uint64_t elements = t->elements(), rows = t->rows();
  if (elements == 0) {
    *out = std::move(t);
    return {};
  }
  WL_RETURN_IF_ERROR(t->take_memory());

  // Fresh memory is zero, so what starts at zero is not touched.
  if (spec.dtype == Dtype::kFloat32) {
    if (spec.init.kind != InitKind::kZeros) {
      kernels().fill(spec.init, mix_in(mix_text(name), spec.seed), t->first_, reinterpret_cast<float*>(t->weights_),
                     elements);
    }
  } else if (spec.init.kind == InitKind::kConstant) {
    for (uint64_t i = 0; i < elements; ++i) {
      if (spec.dtype == Dtype::kFloat64) {
        std::memcpy(t->weights(t->first_ + i), &spec.init.a, 8);
      } else {
        const int64_t value = static_cast<int64_t>(spec.init.a);
        std::memcpy(t->weights(t->first_ + i), &value, 8);
      }
    }
  }
  if (spec.rule.initial_state != 0.0f) {
    for (int v = 0; v < layout.vectors; ++v) std::fill_n(t->state_[v], elements, spec.rule.initial_state);
    if (layout.row_scalars != 0) std::fill_n(t->scalars_, rows * layout.row_scalars, spec.rule.initial_state);
  }
  *out = std::move(t);
  return {};
}

void Tensor::write_out(const Span& span, uint64_t done, uint64_t n, const Arrays& arrays) const {
  if (n == 0) return;  // there may be no output at all
  const std::byte* w = weights(span.first + done);
  std::byte* out = static_cast<std::byte*>(arrays.out) + (span.at + done) * size_of(arrays.out_dtype);
  if (arrays.out_dtype != spec_.dtype) {
    kernels().from_f32(arrays.out_dtype, reinterpret_cast<const float*>(w), out, n);
  } else if (arrays.stream) {
    kernels().stream(out, w, n * size_of(spec_.dtype));
  } else {
    std::memcpy(out, w, n * size_of(spec_.dtype));
  }
}

// The function works on a copy, which is taken over when it has returned, and never if it fails or takes too long.
Status Tensor::apply_foreign(uint32_t index, const Hyper& hyper, const Span* spans, size_t n_spans,
                             const Arrays& arrays) {
  if (foreign_ == nullptr) return Status(Code::kInternal, "tensor '" + name_ + "': its rule is not there");
  const Layout layout = layout_of(spec_.rule);
  Shard& shard = this->shard(index);
  const uint64_t first = cut_.first_of(index), n = cut_.end_of(index) - first;
  if ((spec_.rule.foreign.whole || layout.shard_scalars != 0) &&
      (n_spans != 1 || spans[0].first != first || spans[0].n != n)) {
    return Status(Code::kInvalidArgument, "tensor '" + name_ + "': " + describe(spec_.rule) +
                                              " needs a gradient for all of it, and got one for some rows");
  }
  const Span all{first, n, 0};
  if (spec_.rule.foreign.begins && shard.count == 0) WL_RETURN_IF_ERROR(call_foreign(index, hyper, &all, 1, {}));
  return call_foreign(index, hyper, spans, n_spans, arrays);
}

// Without a gradient, this is the call before the first update.
Status Tensor::call_foreign(uint32_t index, const Hyper& hyper, const Span* spans, size_t n_spans,
                            const Arrays& arrays) {
  const Layout layout = layout_of(spec_.rule);
  Shard& shard = this->shard(index);
  ForeignRule::Size size{.vectors = layout.vectors,
                         .row_scalars = layout.row_scalars,
                         .row = cut_.row,
                         .shard_scalars = layout.shard_scalars};
  for (size_t s = 0; s < n_spans; ++s) size.elements += spans[s].n;
  const bool bounded = arrays.in != nullptr && Bounds::any(spec_.rule);
  const Bounds bounds(spec_.rule);
  const auto each = [&](auto f) {  // f(a span, its place in the arrays of a call)
    for (size_t s = 0, at = 0; s < n_spans; at += spans[s++].n) f(spans[s], at);
  };
  const bool looks = spec_.reject_nonfinite && arrays.lent && !broken(Break::kNonfinite);
  bool finite = true;
  const auto fill = [&](ForeignCall& call) {
    each([&](const Span& span, uint64_t at) {
      const uint64_t here = span.first - first_;
      std::memcpy(call.w + at, weights(span.first), span.n * sizeof(float));
      if (arrays.in != nullptr)
        kernels().to_f32(arrays.in_dtype, static_cast<const std::byte*>(arrays.in) + span.at * size_of(arrays.in_dtype),
                         call.g + at, span.n);
      if (looks) finite = finite && kernels().finite(Dtype::kFloat32, call.g + at, span.n);
      if (bounded) bounds.gradient(call.g + at, call.g + at, span.n);
      for (int v = 0; v < layout.vectors; ++v)
        std::memcpy(call.state[v] + at, state_[v] + here, span.n * sizeof(float));
      if (layout.row_scalars != 0)
        std::memcpy(call.row_scalars + at / cut_.row * layout.row_scalars,
                    scalars_ + here / cut_.row * layout.row_scalars,
                    span.n / cut_.row * layout.row_scalars * sizeof(float));
    });
    if (layout.shard_scalars != 0)
      std::memcpy(call.shard_scalars, shard_scalars(index), layout.shard_scalars * sizeof(float));
    call.first = spans[0].first;
    call.hyper = at_update(spec_.rule, hyper, shard.count + 1);
    call.count = arrays.in != nullptr ? shard.count + 1 : 0;
  };
  const auto take = [&](const ForeignCall& call) {
    if (!finite) return;
    each([&](const Span& span, uint64_t at) {
      const uint64_t here = span.first - first_;
      std::memcpy(weights(span.first), call.w + at, span.n * sizeof(float));
      if (bounded) bounds.weights(reinterpret_cast<float*>(weights(span.first)), span.n);
      for (int v = 0; v < layout.vectors; ++v)
        std::memcpy(state_[v] + here, call.state[v] + at, span.n * sizeof(float));
      if (layout.row_scalars != 0)
        std::memcpy(scalars_ + here / cut_.row * layout.row_scalars,
                    call.row_scalars + at / cut_.row * layout.row_scalars,
                    span.n / cut_.row * layout.row_scalars * sizeof(float));
      if (arrays.out != nullptr) write_out(span, 0, span.n, arrays);
    });
    if (layout.shard_scalars != 0)
      std::memcpy(shard_scalars(index), call.shard_scalars, layout.shard_scalars * sizeof(float));
    if (arrays.stream) kernels().fence();
    if (arrays.in != nullptr) ++shard.count;
  };
  WL_RETURN_IF_ERROR(foreign_->apply(size, fill, take));
  return finite ? Status() : found_nonfinite(index, false);
}

Status Tensor::found_nonfinite(uint32_t shard, bool any) const {
  return changed_on_loan("tensor '" + name_ + "': the gradient", shard, any);
}

Status Tensor::apply(uint32_t shard, const Hyper& hyper, const Span* spans, size_t n_spans, const Arrays& arrays) {
  if (spec_.rule.kind == RuleKind::kForeign) return apply_foreign(shard, hyper, spans, n_spans, arrays);
  const RuleKernels& rule = kernels(spec_.rule.kind);
  const bool row_rule = rule.layout.row_scalars != 0;
  const uint64_t count = ++this->shard(shard).count;
  const Step step = rule.prepare(at_update(spec_.rule, hyper, count), count);
  const bool bounded = Bounds::any(spec_.rule);
  const Bounds bounds(spec_.rule);
  auto* const run = spec_.dtype == Dtype::kFloat32   ? rule.dense
                    : spec_.dtype == Dtype::kFloat64 ? rule.dense_f64
                                                     : rule.dense_i64;
  // Numbers of another type pass through a block that stays in the first-level cache; float32 needs none. So do lent
  // numbers that must be finite, unless the kernel itself looks: what was checked before may have changed, and what is
  // looked at must be what is used.
  const bool convert_in = arrays.in_dtype != spec_.dtype;
  const bool looks = spec_.reject_nonfinite && arrays.lent && !broken(Break::kNonfinite);
  const bool in_pass =
      looks && !convert_in && !bounded && spec_.dtype == Dtype::kFloat32 && (!row_rule || cut_.row <= kLookingRowMax);
  const bool fused_out = arrays.out != nullptr && arrays.out_dtype == Dtype::kFloat32 && spec_.dtype == Dtype::kFloat32;
  const bool separate_out = arrays.out != nullptr && !fused_out;
  uint64_t block = ~uint64_t{0};
  const bool copies = convert_in || (looks && !in_pass);
  if (copies || separate_out)
    block = row_rule ? std::max<uint64_t>(kBlockElements / cut_.row, 1) * cut_.row : kBlockElements;
  const bool stops = os::stops_within("pass");
  if (stops) block = std::max<uint64_t>(spans[0].n / 2 / cut_.row * cut_.row, 1);
  std::unique_ptr<std::byte[]> own;
  if (copies) own = std::make_unique_for_overwrite<std::byte[]>(block * size_of(spec_.dtype));

  for (size_t s = 0; s < n_spans; ++s) {
    const Span& span = spans[s];
    for (uint64_t done = 0; done < span.n; done += block) {
      const uint64_t n = std::min(block, span.n - done);
      const uint64_t element = span.first + done;
      Dense d;
      d.w = weights(element);
      for (int v = 0; v < rule.layout.vectors; ++v) d.state[v] = state_[v] + (element - first_);
      if (row_rule) d.scalars = scalars_ + (element - first_) / cut_.row * rule.layout.row_scalars;
      d.g = static_cast<const std::byte*>(arrays.in) + (span.at + done) * size_of(arrays.in_dtype);
      if (convert_in) {
        kernels().to_f32(arrays.in_dtype, d.g, reinterpret_cast<float*>(own.get()), n);
        d.g = own.get();
      } else if (copies) {
        std::memcpy(own.get(), d.g, n * size_of(spec_.dtype));
        d.g = own.get();
      }
      d.n = n;
      d.row = cut_.row;
      if (fused_out) d.out = static_cast<float*>(arrays.out) + span.at + done;
      d.stream = arrays.stream;
      uint64_t applied = n;
      if (in_pass) {
        applied = rule.looking(step, d);
      } else if (looks && !kernels().finite(spec_.dtype, d.g, n)) {
        applied = 0;
      } else {
        bounded ? bounds.dense(rule, step, d) : run(step, d);
      }
      if (applied != n) {
        const bool any = s != 0 || done != 0 || applied != 0;
        if (!any) --this->shard(shard).count;
        if (arrays.stream) kernels().fence();
        return found_nonfinite(shard, any);
      }
      if (separate_out) write_out(span, done, n, arrays);
      if (stops && s == 0 && done == 0) os::stop_process();
      if (block == ~uint64_t{0}) break;
    }
  }
  if (arrays.stream) kernels().fence();
  return {};
}

void Tensor::apply_mean(uint32_t shard, const Hyper& hyper, const std::vector<Weighed>& terms, float weight,
                        const std::vector<Mean::Copy>& copies) {
  const RuleKernels& rule = kernels(spec_.rule.kind);
  const uint64_t first = cut_.first_of(shard);
  Mean m;
  m.w = reinterpret_cast<float*>(weights(first));
  for (int v = 0; v < rule.layout.vectors; ++v) m.state[v] = state_[v] + (first - first_);
  m.terms = terms.data();
  m.n_terms = terms.size();
  m.by = weight;
  m.n = cut_.end_of(shard) - first;
  m.copies = copies.data();
  m.n_copies = copies.size();
  const uint64_t count = ++this->shard(shard).count;
  const Step step = rule.prepare(at_update(spec_.rule, hyper, count), count);
  Bounds::any(spec_.rule) ? Bounds(spec_.rule).mean(rule, step, m) : rule.mean(step, m);
  if (std::any_of(copies.begin(), copies.end(), [](const Mean::Copy& c) { return c.stream; })) kernels().fence();
}

void Tensor::read(const Span* spans, size_t n_spans, const Arrays& arrays) const {
  for (size_t s = 0; s < n_spans; ++s) write_out(spans[s], 0, spans[s].n, arrays);
  if (arrays.stream) kernels().fence();
}

std::vector<Tensor::Piece> Tensor::pieces_of(uint32_t shard) const {
  const uint64_t first = cut_.first_of(shard), n = cut_.end_of(shard) - first;
  const Layout layout = layout_of(spec_.rule);
  std::vector<Piece> pieces = {{weights(first), n * size_of(spec_.dtype)}};
  for (int v = 0; v < layout.vectors; ++v)
    pieces.push_back({reinterpret_cast<std::byte*>(state_[v] + (first - first_)), n * sizeof(float)});
  if (layout.row_scalars != 0) {
    float* const scalars = scalars_ + (first - first_) / cut_.row * layout.row_scalars;
    pieces.push_back({reinterpret_cast<std::byte*>(scalars), n / cut_.row * layout.row_scalars * sizeof(float)});
  }
  if (layout.shard_scalars != 0)
    pieces.push_back({reinterpret_cast<std::byte*>(shard_scalars(shard)), layout.shard_scalars * sizeof(float)});
  return pieces;
}

uint64_t Tensor::fingerprint(uint32_t shard) const {
  const std::vector<Piece> pieces = pieces_of(shard);
  uint64_t sum = fingerprint_of_count(shard, shards_[shard - run_.first].count);
  for (size_t i = 0; i < pieces.size(); ++i) sum += fingerprint_of_piece(shard, i, 0, pieces[i].data, pieces[i].bytes);
  return sum;
}

uint64_t Tensor::fingerprint_of_piece(uint32_t shard, size_t piece, uint64_t at, const std::byte* from,
                                      uint64_t bytes) const {
  const uint64_t first = cut_.first_of(shard);
  const Layout layout = layout_of(spec_.rule);
  const uint64_t salt = mix_text(name_);
  const auto of = [&](uint64_t whose, uint64_t begin, auto zero) {
    using T = decltype(zero);
    const T* const values = reinterpret_cast<const T*>(from);
    const uint64_t place = begin + at / sizeof(T), n = bytes / sizeof(T);
    if constexpr (std::is_same_v<T, float>) return kernels().fingerprint(whose, place, values, n);
    return windlass::fingerprint_of(whose, place, values, n);
  };
  if (piece == 0) {
    switch (spec_.dtype) {
      case Dtype::kFloat64: return of(salt, first, double{});
      case Dtype::kInt64: return of(salt, first, int64_t{});
      default: return of(salt, first, float{});
    }
  }
  if (piece <= layout.vectors) return of(mix_in(salt, piece - 1), first, float{});
  if (piece == size_t{layout.vectors} + 1 && layout.row_scalars != 0)
    return of(mix_in(salt, 100), first / cut_.row * layout.row_scalars, float{});
  return of(mix_in(salt, 102), uint64_t{shard} * layout.shard_scalars, float{});
}

uint64_t Tensor::fingerprint_of_count(uint32_t shard, uint64_t count) const {
  if (!layout_of(spec_.rule).counts && !scheduled(spec_.rule)) return 0;
  return windlass::fingerprint_of(mix_in(mix_text(name_), 101), shard, &count, 1);
}

}  // namespace windlass
