// C ABI over sycl::queue* and raw pointers: nothing of torch or Python crosses it. Functions that return a pointer give null, and
// those that return an int give nonzero, where they fail; hal_xpu_error() of the same thread says why.
#pragma once
#include <cstddef>
#include <cstdint>

#define HAL_XPU_API extern "C" __attribute__((visibility("default")))

/// One kernel argument. kind: 'p' pointer, 'i' int32, 'l' int64, 'f' float.
struct hal_xpu_arg {
  char kind;
  union {
    void *pointer;
    int32_t i;
    int64_t l;
    float f;
  };
};

HAL_XPU_API const char *hal_xpu_error();
/// Whether device code was compiled ahead of time into this library.
HAL_XPU_API int hal_xpu_ahead_of_time();
/// An in-order queue on the host's processor, made once; null where no runtime offers it.
HAL_XPU_API void *hal_xpu_cpu_queue();
/// The queue's device as JSON. Returns the number of bytes it takes, with the closing zero; written if `size` suffices.
HAL_XPU_API int64_t hal_xpu_describe(void *queue, char *out, int64_t size);
/// A program from SYCL source, from SPIR-V, or from a device binary that hal_xpu_image gave before.
HAL_XPU_API void *hal_xpu_compile(void *queue, const char *source, const char *const *options, int32_t count);
/// Images lie one after another. Kernels of different needs (half precision) are images of their own.
HAL_XPU_API void *hal_xpu_load(void *queue, int32_t binary, const void *data, const int64_t *sizes, int32_t count);
/// Image `index` of a program as SPIR-V (binary == 0) or for its device. Returns its size, 0 where there is none; written if `size` suffices.
HAL_XPU_API int64_t hal_xpu_image(void *program, int32_t binary, int32_t index, void *out, int64_t size);
/// A kernel by name; owned by the program. Null where the device's compiler dropped it.
HAL_XPU_API void *hal_xpu_kernel(void *program, const char *name);
HAL_XPU_API void hal_xpu_release(void *program);
/// Enqueue: `groups` work-groups of `local` work-items in three dimensions, the last one fastest.
HAL_XPU_API int hal_xpu_launch(void *queue, void *kernel, const hal_xpu_arg *args, int32_t count, const int64_t *groups, const int64_t *local);
HAL_XPU_API int hal_xpu_wait(void *queue);
