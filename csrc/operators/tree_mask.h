// The results of tree_mask, for the CPU and for CUDA.
#pragma once

#include <tuple>

#include "operators/tensors.h"
#include "tree_mask/mask_row.h"

namespace specens {

// Calls write(arguments, layout, dtype, mask) to write the mask and the positions, and returns both.
template <typename Write>
std::tuple<TorchTensor, TorchTensor> make_tree_mask(const TorchTensor& parents, const TorchTensor& prefix_lens,
                                                    const std::optional<TorchTensor>& num_nodes, int64_t layout,
                                                    int64_t max_prefix, int64_t window, ScalarType dtype,
                                                    const Write& write) {
    Views views(3);
    MaskArguments arguments =
        mask_arguments(*views.add(parents), *views.add(prefix_lens), views.add(num_nodes), layout, max_prefix, window);
    const int64_t batch = arguments.batch, nodes = arguments.nodes, keys = max_prefix + nodes;
    TorchTensor positions = torch::stable::new_empty(parents, {batch, nodes}, ScalarType::Long);
    arguments.positions = positions.mutable_data_ptr<int64_t>();
    TorchTensor mask =
        layout == SPECENS_MASK_PACKED
            ? torch::stable::new_empty(parents, {batch, nodes, packed_bytes(arguments)}, ScalarType::Byte)
        : layout == SPECENS_MASK_ADDITIVE ? torch::stable::new_empty(parents, {batch, 1, nodes, keys}, dtype)
                                          : torch::stable::new_empty(parents, {batch, nodes, keys}, ScalarType::Bool);
    write(arguments, layout, dtype_code(dtype), mask.mutable_data_ptr());
    return {mask, positions};
}

}  // namespace specens
