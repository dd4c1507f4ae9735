// Copies between host and device, and views of device memory for kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace pretend {

// While a kernel runs, which is CPU code: its inputs are there at once, its outputs are written late.
struct InKernel {
  InKernel();
  ~InKernel();
  bool before;
};

at::Tensor view_for_kernels(const at::Tensor& tensor);
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace pretend
