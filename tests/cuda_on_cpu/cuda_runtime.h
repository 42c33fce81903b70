// The part of CUDA that the kernels of csrc/*/cuda.cu use, for a CPU: blocks run one after the other, the threads of a
// block as threads of the operating system. So a race checker sees what the threads of a block do to each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __grid_constant__
#define __shared__ static  // one block runs at a time

struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 gridDim;

namespace cuda_on_cpu {

inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::atomic<bool> all_true;

template <typename Body>
void run_grid(dim3 grid, unsigned int threads, const Body& body) {
    gridDim = grid;
    block_barrier = std::make_unique<std::barrier<>>(threads);
    std::vector<std::thread> block;
    for (unsigned int thread = 0; thread < threads; ++thread) {
        block.emplace_back([&, thread] {
            threadIdx = dim3(thread);
            for (unsigned int index = 0; index < grid.x * grid.y * grid.z; ++index) {
                blockIdx = dim3(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
                body();
                block_barrier->arrive_and_wait();
            }
        });
    }
    for (std::thread& thread : block) {
        thread.join();
    }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::block_barrier->arrive_and_wait(); }

inline int __syncthreads_and(int value) {
    cuda_on_cpu::all_true = true;
    __syncthreads();
    if (value == 0) {
        cuda_on_cpu::all_true = false;
    }
    __syncthreads();
    const bool result = cuda_on_cpu::all_true;
    __syncthreads();
    return result ? 1 : 0;
}

inline void atomicMin(long long* address, long long value) {
    const std::atomic_ref<long long> cell(*address);
    long long current = cell;
    while (value < current && !cell.compare_exchange_weak(current, value)) {
    }
}
