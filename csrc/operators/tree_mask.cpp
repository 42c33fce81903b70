#include "operators/tree_mask.h"

namespace specens {
namespace {

void tree_mask_cpu(Results& results, const TorchTensor& parents, const TorchTensor& prefix_lens,
                   std::optional<TorchTensor> num_nodes, int64_t layout, int64_t max_prefix, int64_t window,
                   ScalarType dtype) {
    const TorchThreads threads;
    make_tree_mask(results, parents, prefix_lens, num_nodes, layout, max_prefix, window, dtype, write_mask);
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(
    tree_mask,

    "Tensor parents, Tensor prefix_lens, Tensor? num_nodes, int layout, SymInt max_prefix, int window, ScalarType "
    "dtype",
    "(Tensor mask, Tensor positions)", make_two)
