#include "operators/tree_mask.h"

namespace specens {
namespace {

std::tuple<TorchTensor, TorchTensor> tree_mask_cpu(const TorchTensor& parents, const TorchTensor& prefix_lens,
                                                   std::optional<TorchTensor> num_nodes, int64_t layout,
                                                   int64_t max_prefix, int64_t window, ScalarType dtype) {
    const TorchThreads threads;
    return make_tree_mask(parents, prefix_lens, num_nodes, layout, max_prefix, window, dtype, write_mask);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def(
        "tree_mask(Tensor parents, Tensor prefix_lens, Tensor? num_nodes, int layout, SymInt max_prefix, int window, "
        "ScalarType dtype) -> (Tensor mask, Tensor positions)");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("tree_mask", TORCH_BOX(&specens::tree_mask_cpu)); }
