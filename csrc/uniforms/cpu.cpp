#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "uniforms/coins.h"

namespace specens {
namespace {

using torch::stable::Tensor;

// Below this many requests a second thread costs more than it saves.
constexpr int64_t requests_per_thread = 4096;

Tensor uniforms_cpu(const Tensor& seeds, const Tensor& positions, const Tensor& steps, int64_t stream) {
    const Tensor coins = torch::stable::new_empty(seeds, {seeds.numel()}, torch::headeronly::ScalarType::Double);
    const CoinArguments arguments = coin_arguments(seeds, positions, steps, stream, coins);
    torch::stable::parallel_for(0, coins.size(0), requests_per_thread, [&](int64_t begin, int64_t end) {
        for (int64_t request = begin; request < end; ++request) {
            write_coin(arguments, request);
        }
    });
    return coins;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("uniforms_cpp", TORCH_BOX(&specens::uniforms_cpu)); }
