// One coin for each request: the body that the CPU loop and the CUDA grid share.
#pragma once

#include "parts/integers.h"

namespace specens {

struct CoinArguments {
    IntegerRows seeds, positions, steps;  // [batch]
    int64_t stream;
    double* coins;  // [batch], written
};

SPECENS_HOST_DEVICE inline void write_coin(const CoinArguments& arguments, int64_t request) {
    arguments.coins[request] =
        philox_coin(arguments.seeds(request), arguments.positions(request), arguments.steps(request), arguments.stream);
}

inline CoinArguments coin_arguments(const Tensor& seeds, const Tensor& positions, const Tensor& steps, int64_t stream,
                                    double* coins) {
    const int64_t batch = count_elements(seeds);
    return {{"seeds", &seeds, batch}, {"positions", &positions, batch}, {"step", &steps, batch}, stream, coins};
}

// On the CPU; `coins` of the arguments has so many.
void write_coins(const CoinArguments& arguments, int64_t batch);

}  // namespace specens
