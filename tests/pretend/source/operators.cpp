// Operators: memory and copies of the device's own; everything else is computed by the CPU's kernels.
#include "copies.h"
#include "devices.h"
#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <optional>
#include <tuple>

namespace pretend {
namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

// -- memory

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;
  auto* changed = self.unsafeGetTensorImpl();
  changed->set_sizes_contiguous(size);
  size_t needed = (changed->storage_offset() + changed->numel()) * changed->itemsize();
  if (needed > self.storage().nbytes()) grow(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sym_sizes(), {});
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  wait_for(newest(current_stream(tensor.get_device())));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_local_scalar_dense(view_for_kernels(tensor));
}

// Module.to() asks it: may a parameter's data be replaced by data of another device? Else tied weights come apart.
bool may_replace(const Tensor& one, const Tensor& other) {
  return one.layout() == at::kStrided && other.layout() == at::kStrided && !one.is_meta() && !other.is_meta();
}

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

// -- computing

int device_among(const torch::jit::Stack& arguments) {
  for (auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
      return value.toTensor().get_device();
    }
  }
  return current_device;
}

// Lends the state of the device's generator to the CPU's, which the kernel draws from.
void draw_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* arguments) {
  at::Generator generator = default_generator(device_among(*arguments));
  for (auto& value : *arguments) {
    if (!value.isGenerator()) continue;
    if (value.toGenerator().device().type() == KIND) generator = value.toGenerator();
    value = c10::IValue();
  }
  auto cpu = at::detail::getDefaultCPUGenerator();
  std::scoped_lock held(generator.mutex());
  auto before = cpu.get_state();
  cpu.set_state(generator.get_state());
  struct Undo {
    at::Generator &generator, &cpu;
    Tensor& before;
    ~Undo() {
      generator.set_state(cpu.get_state());
      cpu.set_state(before);
    }
  } undo{generator, cpu, before};
  at::native::cpu_fallback(op, arguments);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* arguments) {
  require_usable();
  if (double seconds = kernel_seconds; seconds > 0) spend(current_stream(device_among(*arguments)), seconds);
  InKernel kernel;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    draw_on_cpu(op, arguments);
  } else {
    at::native::cpu_fallback(op, arguments);
  }
}

// Of attention's implementations the one made of matrix products; the others are kernels of single devices.
int64_t attention_by_products(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, bool,
                              std::optional<double>, bool) {
  return 0;
}

MaybeTensor host(const MaybeTensor& tensor) {
  return tensor && tensor->defined() ? MaybeTensor(tensor->cpu()) : std::nullopt;
}

Tensor back_to(const Tensor& device, const Tensor& computed) {
  return computed.defined() ? computed.to(device.device()) : Tensor();
}

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  InKernel kernel;
  return back_to(input, at::convolution(input.cpu(), weight.cpu(), host(bias), stride, padding, dilation, transposed,
                                        output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  InKernel kernel;
  std::array<int64_t, 1> bias = {transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), IntArrayRef(bias), stride,
                                            padding, dilation, transposed, output_padding, groups, wanted);
  return {back_to(input, a), back_to(input, b), back_to(input, c)};
}

// Its schema does not say that it changes the running figures, so they would not be written back.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                                              const MaybeTensor& mean, const MaybeTensor& variance, bool training,
                                              double momentum, double epsilon) {
  InKernel kernel;
  auto host_mean = host(mean), host_variance = host(variance);
  auto [a, b, c] = at::native_batch_norm(input.cpu(), host(weight), host(bias), host_mean, host_variance, training,
                                         momentum, epsilon);
  if (training && host_mean) mean->copy_(*host_mean);
  if (training && host_variance) variance->copy_(*host_variance);
  return {back_to(input, a), back_to(input, b), back_to(input, c)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_has_compatible_shallow_copy_type", &may_replace);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &attention_by_products);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
}

// Copies look themselves whether a tensor is conjugated or negated; PyTorch would copy it first, by a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace pretend
