// One coin for each request: the body that the CPU loop and the CUDA grid share.
#pragma once

#include "parts/philox.h"
#include "parts/tensor.h"

namespace specens {

struct CoinArguments {
    const int64_t* seeds;      // [batch]
    const int64_t* positions;  // [batch]
    const int64_t* steps;      // [batch]
    int64_t seeds_stride, positions_stride, steps_stride;
    int64_t stream;
    double* coins;  // [batch], written
};

SPECENS_HOST_DEVICE inline void write_coin(const CoinArguments& arguments, int64_t request) {
    arguments.coins[request] = philox_coin(arguments.seeds[request * arguments.seeds_stride],
                                           arguments.positions[request * arguments.positions_stride],
                                           arguments.steps[request * arguments.steps_stride], arguments.stream);
}

inline const int64_t* int64_vector(const char* name, const Tensor& tensor, int64_t batch) {
    require_dtype(name, tensor, {SPECENS_INT64}, "int64");
    require_shape(name, tensor, {batch});
    return data_of<int64_t>(tensor);
}

inline CoinArguments coin_arguments(const Tensor& seeds, const Tensor& positions, const Tensor& steps, int64_t stream,
                                    double* coins) {
    const int64_t batch = count_elements(seeds);
    return {int64_vector("seeds", seeds, batch),
            int64_vector("positions", positions, batch),
            int64_vector("step", steps, batch),
            stride(seeds, 0),
            stride(positions, 0),
            stride(steps, 0),
            stream,
            coins};
}

// On the CPU; `coins` of the arguments has so many.
void write_coins(const CoinArguments& arguments, int64_t batch);

}  // namespace specens
