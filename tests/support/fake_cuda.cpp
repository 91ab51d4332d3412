// Lets autograd run on fake "cuda" tensors without a GPU or a driver: a guard of devices that does nothing, and
// CUDA as the accelerator. The library can be loaded at any time: take_over() replaces what torch has registered.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <new>

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

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }  // makes CUDA the accelerator
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
};

extern "C" void take_over() {
  static Guard guard;
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  // torch keeps its hooks for the whole process. They have no data, so ours can take their place in memory.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  // Without a driver, the timer that CUDA builds use in DDP can't record events.
  auto no_timer = [](Device) { return std::unique_ptr<c10d::Timer>(); };
  c10d::TimerRegistry()->Register(DeviceType::CUDA, no_timer, REGISTRY_PREFERRED);
}
