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

#define SPECENS_MASK_ARGUMENTS                                                                                      \
    "Tensor parents, Tensor prefix_lens, Tensor? num_nodes, int layout, SymInt max_prefix, int window, ScalarType " \
    "dtype"

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("tree_mask(" SPECENS_MASK_ARGUMENTS ") -> (Tensor mask, Tensor positions)");
    library.def("tree_mask_out(Tensor(a!)[] out, " SPECENS_MASK_ARGUMENTS ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    using Kernels = specens::Operator<&specens::tree_mask_cpu>;
    library.impl("tree_mask", TORCH_BOX(&Kernels::make_two));
    library.impl("tree_mask_out", TORCH_BOX(&Kernels::write));
}
