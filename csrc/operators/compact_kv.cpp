#include "operators/compact_kv.h"

namespace specens {
namespace {

void compact_kv_cpu(Results& results, const std::vector<TorchTensor>& caches, const TorchTensor& kept,
                    const TorchTensor& prefix_lens, std::optional<TorchTensor> num_kept,
                    std::optional<TorchTensor> block_table, std::optional<TorchTensor> slot_mapping, int64_t batch_dim,
                    int64_t slot_dim) {
    const TorchThreads threads;
    make_compact_kv(results, caches, kept, prefix_lens, num_kept, block_table, slot_mapping, batch_dim, slot_dim,
                    [](const CompactArguments& arguments) { move_slots(arguments); });
}

}  // namespace
}  // namespace specens

#define SPECENS_MOVE_ARGUMENTS                                                                      \
    "Tensor(a!)[] caches, Tensor kept, Tensor prefix_lens, Tensor? num_kept, Tensor? block_table, " \
    "Tensor? slot_mapping, int batch_dim, int slot_dim"

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("compact_kv(" SPECENS_MOVE_ARGUMENTS ") -> (Tensor lengths, Tensor status)");
    library.def("compact_kv_out(Tensor(b!)[] out, " SPECENS_MOVE_ARGUMENTS ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    using Kernels = specens::Operator<&specens::compact_kv_cpu>;
    library.impl("compact_kv", TORCH_BOX(&Kernels::make_two));
    library.impl("compact_kv_out", TORCH_BOX(&Kernels::write));
}
