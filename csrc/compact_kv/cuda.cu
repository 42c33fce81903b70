#include "operators/compact_kv.h"
#include "parts/cuda_launch.h"

namespace specens {
namespace {

constexpr int64_t threads_per_block = 128;
constexpr int64_t max_grid = 65535;  // of the second and third dimension

// What a kernel may take by value, so that a launch needs no copy that a CUDA graph could not hold.
#if CUDART_VERSION >= 12010
constexpr int64_t caches_per_launch = 240;
#else
constexpr int64_t caches_per_launch = 24;
#endif

struct Launch {
    Moves moves;
    CacheView caches[caches_per_launch];
};
static_assert(sizeof(Launch) <= (caches_per_launch > 24 ? 32764 : 4096), "more than a kernel may take by value");

// Every thread of a block gets the number of nodes that the request keeps, -1 where it is refused.
__device__ int64_t judge(const Moves& moves, int64_t request) {
    __shared__ long long count;
    __syncthreads();  // nobody still reads the count of the request before
    if (threadIdx.x == 0) {
        count = INT64_MAX;
    }
    __syncthreads();
    atomicMin(&count, static_cast<long long>(count_kept(moves, request, threadIdx.x, threads_per_block)));
    __syncthreads();
    const bool sound = is_sound(moves, request, count, threadIdx.x, threads_per_block);
    return __syncthreads_and(sound) ? count : -1;
}

// A block moves a part of one cache, for the requests one after the other. Its threads look up as many moves as they
// are, then each does all of them for its own column.
__global__ void compact_kv_kernel(const __grid_constant__ Launch launch) {
    __shared__ Move found[threads_per_block];
    const Moves& moves = launch.moves;
    const int64_t thread = blockIdx.x * threads_per_block + threadIdx.x;
    for (int64_t request = blockIdx.z; request < moves.batch; request += gridDim.z) {
        const int64_t count = judge(moves, request);
        if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
            write_result(moves, request, count, count >= 0);
        }
        for (int64_t first = 0; first < count; first += threads_per_block) {
            const int64_t part = count - first < threads_per_block ? count - first : threads_per_block;
            __syncthreads();
            if (threadIdx.x < part) {
                found[threadIdx.x] = find_move(moves, request, first + threadIdx.x);
            }
            __syncthreads();
            move_part(found, part, launch.caches[blockIdx.y], thread);
        }
    }
}

void launch_part(const Launch& launch, int64_t count, const CudaDevice& device) {
    int64_t threads = 1;
    for (int64_t index = 0; index < count; ++index) {
        threads = std::max(threads, thread_count(launch.caches[index]));
    }
    const dim3 grid(static_cast<unsigned int>((threads + threads_per_block - 1) / threads_per_block),
                    static_cast<unsigned int>(count),
                    static_cast<unsigned int>(std::min(launch.moves.batch, max_grid)));
    device.launch("compact_kv", compact_kv_kernel, grid, threads_per_block, launch);
}

void launch_all(const CompactArguments& arguments, const CudaDevice& device) {
    const auto total = static_cast<int64_t>(arguments.caches.size());
    for (int64_t first = 0; first < total && arguments.moves.batch > 0; first += caches_per_launch) {
        Launch launch{arguments.moves, {}};
        const int64_t count = std::min(caches_per_launch, total - first);
        std::copy_n(arguments.caches.all().begin() + first, count, launch.caches);
        launch_part(launch, count, device);
    }
}

void compact_kv_cuda(Results& results, const std::vector<TorchTensor>& caches, const TorchTensor& kept,
                     const TorchTensor& prefix_lens, std::optional<TorchTensor> num_kept,
                     std::optional<TorchTensor> block_table, std::optional<TorchTensor> slot_mapping, int64_t batch_dim,
                     int64_t slot_dim) {
    const CudaDevice device(prefix_lens);
    make_compact_kv(results, caches, kept, prefix_lens, num_kept, block_table, slot_mapping, batch_dim, slot_dim,
                    [&](const CompactArguments& arguments) { launch_all(arguments, device); });
}

}  // namespace
}  // namespace specens

SPECENS_CUDA_OPERATORS(library) {
    using Kernels = specens::Operator<&specens::compact_kv_cuda>;
    library.impl("compact_kv", TORCH_BOX(&Kernels::make_two));
    library.impl("compact_kv_out", TORCH_BOX(&Kernels::write));
}
