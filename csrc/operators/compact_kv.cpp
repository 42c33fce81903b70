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

SPECENS_OPERATOR(compact_kv,

                 "Tensor(a!)[] caches, Tensor kept, Tensor prefix_lens, Tensor? num_kept, Tensor? block_table, "
                 "Tensor? slot_mapping, int batch_dim, int slot_dim",
                 "(Tensor lengths, Tensor status)", make_two)
