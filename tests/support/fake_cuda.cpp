// Lets autograd run on fake "cuda" tensors where torch is built for the CPU: a guard of devices that does nothing, and
// CUDA as the accelerator. It takes the place of torch's own symbols, so it must be loaded before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Once torch is there: a build for CUDA has registered its own since.
extern "C" void take_over() {
  static Guard guard;
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator

namespace at::detail {
struct Hooks : CUDAHooksInterface {
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
};
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail
