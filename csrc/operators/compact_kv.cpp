#include "operators/compact_kv.h"

namespace specens {
namespace {

std::tuple<TorchTensor, TorchTensor> compact_kv_cpu(const std::vector<TorchTensor>& caches, const TorchTensor& kept,
                                                    const TorchTensor& prefix_lens, std::optional<TorchTensor> num_kept,
                                                    std::optional<TorchTensor> block_table,
                                                    std::optional<TorchTensor> slot_mapping, int64_t batch_dim,
                                                    int64_t slot_dim) {
    const TorchThreads threads;
    return make_compact_kv(caches, kept, prefix_lens, num_kept, block_table, slot_mapping, batch_dim, slot_dim,
                           move_slots);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def(
        "compact_kv(Tensor(a!)[] caches, Tensor kept, Tensor prefix_lens, Tensor? num_kept, Tensor? block_table, "
        "Tensor? slot_mapping, int batch_dim, int slot_dim) -> (Tensor lengths, Tensor status)");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("compact_kv", TORCH_BOX(&specens::compact_kv_cpu)); }
