// One coin for each request: the body that the CPU loop and the CUDA grid share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "parts/philox.h"

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

inline void require_int64_vector(const torch::stable::Tensor& tensor, int64_t batch, const char* name) {
    if (tensor.dim() != 1 || tensor.size(0) != batch || tensor.scalar_type() != torch::headeronly::ScalarType::Long) {
        throw std::invalid_argument(std::string(name) + " must be an int64 tensor of shape [" + std::to_string(batch) +
                                    "]");
    }
}

inline CoinArguments coin_arguments(const torch::stable::Tensor& seeds, const torch::stable::Tensor& positions,
                                    const torch::stable::Tensor& steps, int64_t stream,
                                    const torch::stable::Tensor& coins) {
    const int64_t batch = coins.size(0);
    require_int64_vector(seeds, batch, "seeds");
    require_int64_vector(positions, batch, "positions");
    require_int64_vector(steps, batch, "step");
    return {seeds.const_data_ptr<int64_t>(),
            positions.const_data_ptr<int64_t>(),
            steps.const_data_ptr<int64_t>(),
            seeds.stride(0),
            positions.stride(0),
            steps.stride(0),
            stream,
            coins.mutable_data_ptr<double>()};
}

}  // namespace specens
