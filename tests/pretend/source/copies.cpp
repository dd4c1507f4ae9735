#include "copies.h"

#include "memory.h"
#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>

namespace pretend {
namespace {

thread_local bool in_kernel = false;

at::Tensor host_tensor(const at::Tensor& like, void* address, std::function<void()> keeps = {}) {
  auto options = like.options().device(at::kCPU).requires_grad(false).pinned_memory(std::nullopt);
  auto made = at::from_blob(address, like.sizes(), like.strides(), [keeps](void*) {}, options);
  if (like.is_complex() && like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor view_of_host(const at::Tensor& tensor) {  // which lives as long as it is referred to
  auto storage = tensor.storage();
  return host_tensor(tensor, tensor.data_ptr(), [storage] {});
}

void write(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from);
}

double seconds_for(const at::Tensor& copied) {
  double bandwidth = copy_bandwidth;
  return bandwidth > 0 && !in_kernel ? double(copied.nbytes()) / bandwidth : 0;
}

void between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto* source = current_stream(from.get_device());
  auto* target = current_stream(to.get_device());
  auto a = view_for_kernels(from), b = view_for_kernels(to);
  follow(source, newest(target));
  follow(target, ask(source, [=] { write(b, a); }));
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto* stream = current_stream(to.get_device());
  auto b = view_for_kernels(to);
  bool pinned = is_pinned(from.data_ptr());
  // what is not pinned is read at once, as by a driver that puts it into a buffer of its own
  auto a = in_kernel || (non_blocking && pinned) ? view_of_host(from) : from.clone();
  auto copy = [=] {
    if (pinned) see_earlier(stream);  // also what other streams, for which this one waited, have copied there
    write(b, a);
  };
  auto mark = ask(stream, copy, seconds_for(to));
  bool driver_busy = !pinned && copy_bandwidth > 0;
  if (!in_kernel && (!non_blocking || driver_busy)) wait_for(mark);
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto* stream = current_stream(from.get_device());
  auto a = view_for_kernels(from);
  auto b = view_of_host(to);
  if (in_kernel) {
    run_to(newest(stream));
    write(b, a);
    return;
  }
  auto mark = ask(
      stream,
      [=] {
        auto read = a.clone();
        arrive(stream, [=] { write(b, read); });
      },
      seconds_for(to));
  if (!non_blocking || !is_pinned(to.data_ptr())) wait_for(mark);
}

}  // namespace

InKernel::InKernel() : before(in_kernel) { in_kernel = true; }
InKernel::~InKernel() { in_kernel = before; }

// Not a reference: memory that is freed before the kernel runs is freed for the kernel, too.
at::Tensor view_for_kernels(const at::Tensor& tensor) { return host_tensor(tensor, readable(tensor.data_ptr())); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto source = from.expand_as(to);
  if (!from.is_privateuseone()) {
    to_device(source, to, non_blocking);
  } else if (!to.is_privateuseone()) {
    to_host(source, to, non_blocking);
  } else {
    between_devices(source, to);
  }
  return to;
}

}  // namespace pretend
