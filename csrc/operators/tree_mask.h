// The results of tree_mask, for the CPU and for CUDA.
#pragma once

#include "operators/results.h"
#include "tree_mask/mask_row.h"

namespace specens {

// Calls write(arguments, layout, dtype, mask) to write the results, the mask and the positions.
template <typename Write>
void make_tree_mask(Results& results, const TorchTensor& parents, const TorchTensor& prefix_lens,
                    const std::optional<TorchTensor>& num_nodes, int64_t layout, int64_t max_prefix, int64_t window,
                    ScalarType dtype, const Write& write) {
    Views views(3);
    const Tensor* nodes_of = views.add(num_nodes);
    MaskArguments arguments =
        mask_arguments(*views.add(parents), *views.add(prefix_lens), nodes_of, layout, max_prefix, window);
    const int64_t batch = arguments.batch, nodes = arguments.nodes, keys = max_prefix + nodes;
    void* mask = layout == SPECENS_MASK_PACKED
                     ? results.add({batch, nodes, packed_bytes(arguments)}, ScalarType::Byte, &parents)
                 : layout == SPECENS_MASK_ADDITIVE ? results.add({batch, 1, nodes, keys}, dtype, &parents)
                                                   : results.add({batch, nodes, keys}, ScalarType::Bool, &parents);
    arguments.positions = results.add<int64_t>({batch, nodes}, ScalarType::Long, &parents);
    results.finish(views.all());
    write(arguments, layout, dtype_code(dtype), mask);
}

}  // namespace specens
