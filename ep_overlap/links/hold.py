"""A CUDA kernel that holds its stream for a stated time: one thread that watches the clock.

``%globaltimer`` counts nanoseconds whatever the GPU's clock does, so the time does not stretch when
other streams are busy (``torch.cuda._sleep`` counts cycles, and does). The kernel is PTX, which the
driver itself translates: no compiler and no CUDA toolkit is needed.
"""

import ctypes
from typing import Final, final

import torch

# Reads of %globaltimer are volatile in PTX. nanosleep (compute capability 7.0 and later) leaves the
# multiprocessor's issue slots to compute, for 400 ns at most beyond the time asked.
_PTX: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 duration_ns)
{
    .reg .u64 %now, %end, %duration;
    .reg .pred %due;
    mov.u64 %now, %globaltimer;
    ld.param.u64 %duration, [duration_ns];
    add.u64 %end, %now, %duration;
again:
    mov.u64 %now, %globaltimer;
    setp.ge.u64 %due, %now, %end;
    @%due bra done;
    nanosleep.u32 200;
    bra again;
done:
    ret;
}
"""


@final
class CudaHold:
    """The kernel, loaded on one device. Needs compute capability 7.0.

    Raises:
        RuntimeError: the driver refuses to load or to launch it; with the driver's own words.
    """

    def __init__(self, device: torch.device) -> None:
        # The driver's calls take pointers, which ctypes would pass as 32-bit numbers undeclared.
        # The declarations belong to this object's handle of the library, nobody else's.
        driver = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
        driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        driver.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
        driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        self._driver = driver
        self._module, self._kernel = pointer(), pointer()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the device's context, current in this thread
            self._check(driver.cuModuleLoadData(ctypes.byref(self._module), _PTX))
            self._check(
                driver.cuModuleGetFunction(ctypes.byref(self._kernel), self._module, b"hold")
            )

    def launch(self, duration_ns: int, cuda_stream: int) -> None:
        """Hold a stream, given by its handle, from when all before it is done.

        The device must be current in the calling thread, with a context (any call of torch's that
        used the device has made one).
        """
        duration = ctypes.c_uint64(duration_ns)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))  # copied by the launch
        self._check(
            self._driver.cuLaunchKernel(
                self._kernel, 1, 1, 1, 1, 1, 1, 0, cuda_stream, arguments, None
            )
        )

    def _check(self, status: int) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode() if text.value else "no description"
            raise RuntimeError(f"the hold kernel: CUDA driver error {status}: {said}")
