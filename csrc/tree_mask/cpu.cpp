#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "tree_mask/mask_row.h"

namespace specens {
namespace {

// Below this many keys a second thread costs more than it saves.
constexpr int64_t keys_per_thread = 65536;

std::tuple<Tensor, Tensor> tree_mask_cpu(const Tensor& parents, const Tensor& prefix_lens,
                                         std::optional<Tensor> num_nodes, int64_t layout, int64_t max_prefix,
                                         int64_t window, ScalarType dtype) {
    const auto launch = [](const MaskArguments& arguments, const auto& rows) {
        const int64_t keys = arguments.max_prefix + arguments.nodes;
        const int64_t grain = std::max<int64_t>(1, keys_per_thread / std::max<int64_t>(1, keys));
        torch::stable::parallel_for(0, arguments.batch * arguments.nodes, grain, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const int64_t request = row / arguments.nodes, node = row % arguments.nodes;
                fill_row(arguments, request, node, rows[row], 0, 1);
                show_path(arguments, request, node, rows[row]);
            }
        });
    };
    return make_tree_mask(parents, prefix_lens, num_nodes, layout, max_prefix, window, dtype, launch);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("tree_mask_cpp", TORCH_BOX(&specens::tree_mask_cpu)); }
