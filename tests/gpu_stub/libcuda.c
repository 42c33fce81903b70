/* What Triton asks of libcuda.so.1, answered as by a GPU that has done everything at once: nothing is launched. */
#include <stddef.h>
#include <stdint.h>

#define ANSWER(name, ...) int name(__VA_ARGS__) { return 0; }
#define HANDLE ((void*)1)

enum { SHARED_MEMORY_LIMIT = 232448, THREADS = 1024, DRIVER_VERSION = 13000 };

ANSWER(cuInit, unsigned flags)
ANSWER(cuCtxSetCurrent, void* context)
ANSWER(cuCtxSetLimit, int limit, size_t value)
ANSWER(cuFuncSetAttribute, void* function, int attribute, int value)
ANSWER(cuFuncSetCacheConfig, void* function, int config)
ANSWER(cuModuleUnload, void* module)
ANSWER(cuPointerGetAttributes, unsigned count, int* attributes, void** data, uint64_t pointer)
ANSWER(cuTensorMapEncodeTiled, void* map)
ANSWER(cuTensorMapEncodeIm2col, void* map)
ANSWER(cuLaunchKernelEx, const void* config, void* function, void** parameters, void** extra)

#define GIVE(name, type, value, ...) \
    int name(type* result, ##__VA_ARGS__) { *result = (value); return 0; }

GIVE(cuDeviceGetCount, int, 1)
GIVE(cuDeviceGet, int, index, int index)
GIVE(cuDeviceGetAttribute, int, SHARED_MEMORY_LIMIT, int attribute, int device)
GIVE(cuDevicePrimaryCtxRetain, void*, HANDLE, int device)
GIVE(cuCtxGetCurrent, void*, HANDLE)
GIVE(cuCtxGetDevice, int, 0)
GIVE(cuCtxGetLimit, size_t, 1, int limit)
GIVE(cuDriverGetVersion, int, DRIVER_VERSION)
GIVE(cuFuncGetAttribute, int, THREADS, int attribute, void* function)
GIVE(cuModuleLoadData, void*, HANDLE, const void* image)
GIVE(cuModuleGetFunction, void*, HANDLE, void* module, const char* name)
GIVE(cuOccupancyMaxActiveClusters, int, 1, void* function, void* config)

int cuGetErrorString(int error, const char** text) { *text = "stub"; return 0; }
int cuStreamIsCapturing(void* stream, int* status) { *status = 0; return 0; }
int cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) { *(uint64_t*)data = pointer; return 0; }
