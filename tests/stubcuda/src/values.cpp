// STUBCUDA_COMPUTE=1: operators have true values.
//
// Device memory is host memory, so a CUDA tensor's bytes can be read as a CPU tensor. Every operator with a CUDA kernel
// gets a wrapper. The CPU's kernel runs on the same bytes. Then PyTorch's CUDA kernel runs as ever: it allocates outputs,
// temporaries and workspaces, and launches to no effect. The CPU's results are written into what it returned. So the
// allocator sees what it would see on a card, and the values are true.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {
using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::Stack;
using Tensors = std::vector<Tensor>;

std::mutex lock;
std::set<std::string> untrue;           // operators that ran and whose values are garbage
thread_local bool computed_already = false;  // inside of a CUDA kernel whose values are there

const c10::DispatchKeySet ABOVE_KERNELS = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher});

// A CUDA tensor's bytes as a CPU tensor.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "not strided");
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copied(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor host = on_host(tensor);
  return at::empty_strided(host.sizes(), host.strides(), host.options()).copy_(host);
}

void write(const Tensor& to, const Tensor& value) {
  if (!to.defined() || !value.defined() || !to.numel() || to.numel() != value.numel()) return;
  on_host(to).copy_(value.sizes() == to.sizes() ? value : value.reshape(to.sizes()));
}

// --- random numbers: a function of the CUDA generator's seed and offset, so that they repeat as they should -----------

uint64_t hash_of(const Tensor& tensor) {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a
  auto bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return hash;
}

Tensor generator_state(const std::optional<at::Generator>& given) {
  if (given && given->defined()) return given->get_state();
  auto index = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index();
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, index)).get_state();
}

// --- one call -----------------------------------------------------------------------------------------------------------

struct Call {
  const c10::FunctionSchema& schema;
  Stack given;     // as CPU tensors; copies, where the operator changes them
  Stack returned;  // by the CUDA kernel
  Tensor state;    // of the CUDA generator, before

  bool has(const char* name) const { return schema.argumentIndexWithName(name).has_value(); }
  const IValue& operator[](const char* name) const { return given.at(static_cast<size_t>(*schema.argumentIndexWithName(name))); }
  Tensor tensor(const char* name) const { return (*this)[name].isTensor() ? (*this)[name].toTensor() : Tensor(); }
  std::vector<int64_t> ints(const char* name) const { return (*this)[name].toIntVector(); }
  Tensor out(size_t index) const {
    return index < returned.size() && returned[index].isTensor() ? returned[index].toTensor() : Tensor();
  }
  void answer(const Tensors& values) const { for (size_t i = 0; i < values.size(); i++) write(out(i), values[i]); }
};

// --- operators that the CPU has no kernel for ----------------------------------------------------------------------------

// The seed and the offset that a fused attention's kernel would have left for its backward.
std::pair<size_t, size_t> seed_of(const Call& call) {
  return call.schema.returns().size() == 4 ? std::pair<size_t, size_t>{2, 3} : std::pair<size_t, size_t>{6, 7};
}

struct Attention {
  Tensor query, key, value, logsumexp, weights, mask;
  double scale;
  int64_t groups;

  // Gradients of keys or values, summed over the queries that share a head.
  Tensor shared(const Tensor& grad) const { return grad.unflatten(1, {grad.size(1) / groups, groups}).sum(2); }

  Attention(const Call& call, uint64_t seed) {
    query = call.tensor("query").to(at::kFloat);
    key = call.tensor("key").to(at::kFloat);
    value = call.tensor("value").to(at::kFloat);
    groups = query.size(1) / key.size(1);  // grouped queries share a head of keys and values
    if (groups > 1) key = key.repeat_interleave(groups, 1), value = value.repeat_interleave(groups, 1);
    scale = call["scale"].isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : call["scale"].toDouble();
    Tensor scores = at::matmul(query * scale, key.transpose(-2, -1));
    if (call.has("attn_bias") && call.tensor("attn_bias").defined()) scores = scores + call.tensor("attn_bias").to(at::kFloat);
    if (call["is_causal"].toBool()) {
      Tensor later = at::ones({query.size(-2), key.size(-2)}, at::kBool).triu(1);
      scores = scores.masked_fill(later, -INFINITY);
    }
    logsumexp = at::logsumexp(scores, -1);
    weights = at::nan_to_num(at::exp(scores - logsumexp.unsqueeze(-1)), 0.0);
    double dropped = call["dropout_p"].toDouble();
    mask = at::ones({1});
    if (dropped > 0) mask = at::empty_like(weights).bernoulli_(1 - dropped, at::detail::createCPUGenerator(seed)) / (1 - dropped);
  }
};

void attention(const Call& call) {
  auto [seed, offset] = seed_of(call);
  uint64_t drawn = hash_of(call.state);
  if (call.out(seed).defined() && call.out(seed).numel()) std::memcpy(call.out(seed).mutable_data_ptr(), &drawn, sizeof drawn);
  Attention made(call, drawn);
  write(call.out(0), at::matmul(made.weights * made.mask, made.value));
  Tensor kept = call.out(1);  // longer than the rows, where the kernel aligns them
  if (kept.defined() && kept.numel())
    on_host(kept).reshape({kept.size(0), kept.size(1), -1}).slice(2, 0, made.logsumexp.size(-1)).copy_(made.logsumexp);
}

void attention_backward(const Call& call) {
  Tensor seed = call.tensor("philox_seed"), grad = call.tensor(call.has("grad_out_") ? "grad_out_" : "grad_out").to(at::kFloat);
  uint64_t drawn = 0;
  if (seed.defined() && seed.numel()) std::memcpy(&drawn, seed.const_data_ptr(), sizeof drawn);
  Attention made(call, drawn);
  Tensor of_weights = at::matmul(grad, made.value.transpose(-2, -1)) * made.mask;
  Tensor of_scores = made.weights * (of_weights - (of_weights * made.weights).sum(-1, true));
  call.answer({at::matmul(of_scores, made.key) * made.scale,
               made.shared(at::matmul(of_scores.transpose(-2, -1), made.query) * made.scale),
               made.shared(at::matmul((made.weights * made.mask).transpose(-2, -1), grad))});
  if (call.has("attn_bias") && call.tensor("attn_bias").defined() && call.out(3).defined())
    write(call.out(3), at::sum_to(of_scores, call.tensor("attn_bias").sizes()));
}

void convolution(const Call& call) {
  bool transposed = call.has("output_padding");
  auto extra = transposed ? call.ints("output_padding") : std::vector<int64_t>(call.ints("stride").size(), 0);
  call.answer({at::convolution(call.tensor("self"), call.tensor("weight"), {}, call.ints("stride"), call.ints("padding"),
                               call.ints("dilation"), transposed, extra, call["groups"].toInt())});
}

void depthwise(const Call& call) {
  Tensor input = call.tensor("self");
  call.answer({at::convolution(input, call.tensor("weight"), call.tensor("bias"), call.ints("stride"), call.ints("padding"),
                               call.ints("dilation"), false, std::vector<int64_t>(call.ints("stride").size(), 0), input.size(1))});
}

void batch_norm(const Call& call) {
  auto [out, mean, inverse] = at::native_batch_norm(
      call.tensor("input"), call.tensor("weight"), call.tensor("bias"), call.tensor("running_mean"), call.tensor("running_var"),
      call["training"].toBool(), call["exponential_average_factor"].toDouble(), call["epsilon"].toDouble());
  call.answer({out, mean, inverse});
}

void batch_norm_backward(const Call& call) {
  auto [input, weight, bias] = at::native_batch_norm_backward(
      call.tensor("grad_output"), call.tensor("input"), call.tensor("weight"), call.tensor("running_mean"), call.tensor("running_var"),
      call.tensor("save_mean"), call.tensor("save_var"), true, call["epsilon"].toDouble(), {true, true, true});
  call.answer({input, weight, bias});
}

// cuDNN's recurrent nets, as the CPU's; the backward runs those forward again.
Tensors recurrent(const Call& call, Tensors weights, const Tensor& input, const Tensor& hidden, const Tensor& cell) {
  bool train = call["train"].toBool(), both = call["bidirectional"].toBool(), batch_first = call["batch_first"].toBool();
  int64_t each = call["weight_stride0"].toInt(), layers = call["num_layers"].toInt(), mode = call["mode"].toInt();
  TORCH_CHECK(!train || call["dropout"].toDouble() == 0, "dropout between recurrent layers");
  TORCH_CHECK(call["batch_sizes"].toListRef().empty(), "packed sequences");
  int64_t rows = (mode == 2 ? 4 : mode == 3 ? 3 : 1) * call["hidden_size"].toInt();
  for (size_t i = 0; i < weights.size(); i++)  // autocast hands them over as columns
    weights[i] = static_cast<int64_t>(i) % each < 2 ? weights[i].reshape({rows, -1}) : weights[i].reshape({-1});
  if (mode == 2) {
    auto [out, last, last_cell] = at::lstm(input, {hidden, cell}, weights, each == 4, layers, 0.0, train, both, batch_first);
    return {out, last, last_cell};
  }
  using Run = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, at::TensorList, bool, int64_t, double, bool, bool, bool);
  Run run = mode == 3 ? static_cast<Run>(at::gru) : mode == 1 ? static_cast<Run>(at::rnn_tanh) : static_cast<Run>(at::rnn_relu);
  auto [out, last] = run(input, hidden, weights, each == 4, layers, 0.0, train, both, batch_first);
  return {out, last};
}

void rnn(const Call& call) {
  call.answer(recurrent(call, call["weight"].toTensorVector(), call.tensor("input"), call.tensor("hx"), call.tensor("cx")));
}

void rnn_backward(const Call& call) {
  c10::impl::ForceDispatchKeyGuard as_at_the_top{c10::default_included_set, c10::default_excluded_set};
  at::AutoGradMode on(true);
  auto leaf = [](const Tensor& tensor) { return tensor.defined() ? tensor.clone().requires_grad_() : tensor; };
  Tensors weights, outs, grads;
  for (const Tensor& weight : call["weight"].toTensorVector()) weights.push_back(leaf(weight));
  Tensor input = leaf(call.tensor("input")), hidden = leaf(call.tensor("hx")), cell = leaf(call.tensor("cx"));
  Tensors made = recurrent(call, weights, input, hidden, cell);
  const char* const names[] = {"grad_output", "grad_hy", "grad_cy"};
  for (size_t i = 0; i < made.size(); i++)
    if (call.tensor(names[i]).defined()) outs.push_back(made[i]), grads.push_back(call.tensor(names[i]));
  Tensors leaves = {input, hidden};
  if (cell.defined()) leaves.push_back(cell);
  size_t first_weight = leaves.size();
  leaves.insert(leaves.end(), weights.begin(), weights.end());
  Tensors found = torch::autograd::grad(outs, leaves, grads, std::nullopt, false, true);
  c10::impl::ExcludeDispatchKeyGuard below(ABOVE_KERNELS);
  at::AutoGradMode off(false);
  call.answer({found.begin(), found.begin() + static_cast<ptrdiff_t>(first_weight)});
  Tensors into = call.returned.at(3).toTensorVector();
  for (size_t i = 0; i < into.size(); i++) write(into[i], found[first_weight + i]);
}

using Written = std::function<void(const Call&)>;
const std::map<std::string, Written> WRITTEN = {
    {"aten::_scaled_dot_product_efficient_attention", attention},
    {"aten::_scaled_dot_product_efficient_attention_backward", attention_backward},
    {"aten::_scaled_dot_product_flash_attention", attention},
    {"aten::_scaled_dot_product_flash_attention_backward", attention_backward},
    {"aten::_scaled_dot_product_cudnn_attention", attention},
    {"aten::_scaled_dot_product_cudnn_attention_backward", attention_backward},
    {"aten::cudnn_convolution", convolution},
    {"aten::cudnn_convolution_transpose", convolution},
    {"aten::_conv_depthwise2d", depthwise},
    {"aten::cudnn_batch_norm", batch_norm},
    {"aten::cudnn_batch_norm_backward", batch_norm_backward},
    {"aten::_cudnn_rnn", rnn},
    {"aten::_cudnn_rnn_backward", rnn_backward},
};

// Their CUDA kernels read from the device how large the result is: the CPU's result is taken instead.
const std::set<std::string> SIZED_BY_VALUES = {
    "aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::masked_select",
    "aten::bincount", "aten::repeat_interleave", "aten::equal"};
// They make no values, or real ones.
const std::set<std::string> AS_THEY_ARE = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::_local_scalar_dense", "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::_fused_sdp_choice", "aten::_assert_async", "aten::is_set_to",
    "aten::_cudnn_init_dropout_state", "aten::_cudnn_rnn_flatten_weight", "aten::_has_compatible_shallow_copy_type"};

// --- the wrapper -----------------------------------------------------------------------------------------------------------

// Calls `change` with each tensor of a value, and puts together what it answers.
IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& tensor : value.toTensorList()) out.push_back(change(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      out.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return out;
  }
  return value;
}

Tensors tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : Tensors();
}

class Wrapper final : public c10::OperatorKernel {
 public:
  explicit Wrapper(const OperatorHandle& op)
      : cuda_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)),
        random_(op.hasTag(at::Tag::nondeterministic_seeded)),
        sized_by_values_(SIZED_BY_VALUES.count(op.schema().name())),
        copies_(op.schema().name() == "aten::copy_") {
    auto written = WRITTEN.find(op.schema().name());
    if (written != WRITTEN.end() && op.schema().overload_name().empty()) written_ = written->second;
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (computed_already && !sized_by_values_ && !copies_) return cuda_.callBoxed(op, keys, stack);
    const auto& schema = op.schema();
    size_t count = schema.arguments().size(), below_arguments = stack->size() - count;
    Stack arguments(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
    if (copies_) {
      cuda_.callBoxed(op, keys, stack);
      c10::impl::ExcludeDispatchKeyGuard below(ABOVE_KERNELS);
      if (arguments[0].toTensor().layout() == at::kStrided && arguments[1].toTensor().layout() == at::kStrided)
        on_host(arguments[0].toTensor()).copy_(on_host(arguments[1].toTensor()));
      return;
    }
    Call call{schema, {}, {}, {}};
    std::optional<Stack> values;
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE_KERNELS);
    try {
      values = computed(op, arguments, call);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {
    }
    bool refused = sized_by_values_ && values;
    if (!refused) try {
      bool outer = computed_already;
      auto restore = c10::make_scope_exit([outer] { computed_already = outer; });
      computed_already = outer || values || written_;  // else the operators inside may be the ones to compute
      cuda_.callBoxed(op, keys, stack);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {  // cuSOLVER and cuFFT are not there
      if (!values) throw;
      refused = true;
    }
    if (refused) {  // the CPU's results, moved to the device, in place of the kernel's
      stack->resize(below_arguments);
      at::Device device = device_of(arguments);
      for (const IValue& value : *values)
        stack->push_back(mapped(value, [&](const Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          Tensor out = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
          write(out, tensor);
          return out;
        }));
      return write_back(schema, arguments, call.given);
    }
    size_t outs = schema.returns().size();
    call.returned.assign(stack->end() - static_cast<ptrdiff_t>(outs), stack->end());
    if (written_) {
      try {
        written_(call);
      } catch (const c10::Error&) {
        remember(op);
      }
      return;
    }
    if (!values) return remember(op);
    write_back(schema, arguments, call.given);
    for (size_t i = 0; i < outs; i++) {
      const auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) continue;
      IValue& place = stack->at(stack->size() - outs + i);
      Tensors into = tensors_of(place), from = tensors_of(values->at(i));
      for (size_t j = 0; j < into.size() && j < from.size(); j++) write(into[j], from[j]);
      if (!place.isTensor() && !place.isTensorList() && !place.isNone()) place = values->at(i);
    }
  }

 private:
  c10::SafeKernelFunction cuda_;
  bool random_, sized_by_values_, copies_;
  Written written_;

  // What the CPU's kernel returns; nothing, where the values are written by hand.
  std::optional<Stack> computed(const OperatorHandle& op, const Stack& arguments, Call& call) {
    std::optional<at::Generator> given;
    for (const IValue& value : arguments)
      if (value.isGenerator() && value.toGenerator().defined()) given = value.toGenerator();
    if ((random_ || written_) && (!given || given->device().is_cuda())) call.state = generator_state(given);
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = call.schema.arguments()[i].alias_info();
      const IValue& value = arguments[i];
      if (value.isDevice() && value.toDevice().is_cuda()) call.given.push_back(at::Device(at::kCPU));
      else if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().is_cuda())
        call.given.push_back(at::detail::createCPUGenerator(call.state.defined() ? hash_of(call.state) : 0));
      else call.given.push_back(mapped(value, alias && alias->isWrite() ? copied : on_host));
    }
    if (written_) return std::nullopt;
    Stack run = call.given;
    if (!random_ || !call.state.defined() || given) {
      op.callBoxed(&run);
      return run;
    }
    at::Generator host = at::globalContext().defaultGenerator(at::kCPU);
    Tensor before = host.get_state();
    auto restore = c10::make_scope_exit([&] { host.set_state(before); });
    host.set_current_seed(hash_of(call.state));
    op.callBoxed(&run);
    return run;
  }

  static at::Device device_of(const Stack& arguments) {
    for (const IValue& value : arguments)
      for (const Tensor& tensor : tensors_of(value))
        if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    return at::Device(at::kCUDA, 0);
  }

  // What the operator changed.
  static void write_back(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& given) {
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      Tensors to = tensors_of(arguments[i]), from = tensors_of(given[i]);
      for (size_t j = 0; j < to.size(); j++) {
        if (to[j].defined() && from[j].defined() && to[j].sizes() != from[j].sizes()) to[j].resize_(from[j].sizes());
        write(to[j], from[j]);
      }
    }
  }

  static void remember(const OperatorHandle& op) {
    std::lock_guard<std::mutex> hold(lock);
    untrue.insert(c10::toString(op.operator_name()));
  }
};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) int stubcuda_compute() {
  static auto* const wrappers = new std::vector<c10::RegistrationHandleRAII>();  // for as long as the process
  if (!wrappers->empty()) return static_cast<int>(wrappers->size());
  struct Quiet final : c10::WarningHandler { void process(const c10::Warning&) override {} } quiet;  // of kernels replaced
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.emplace_back("aten::copy_", "");
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) || AS_THEY_ARE.count(name.name) || is_view(op->schema())) continue;
    wrappers->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Wrapper>(*op)), std::nullopt, nullptr, "stubcuda"));
  }
  return static_cast<int>(wrappers->size());
}

// The operators whose values were garbage, a line each; how many bytes that takes.
extern "C" __attribute__((visibility("default"))) int stubcuda_untrue(char* out, int room) {
  std::lock_guard<std::mutex> hold(lock);
  std::string all;
  for (const auto& name : untrue) all += name + "\n";
  return snprintf(out, static_cast<size_t>(room), "%s", all.c_str());
}
