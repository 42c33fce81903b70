// The arguments and results of compact_kv, for the CPU and for CUDA.
#pragma once

#include "compact_kv/arguments.h"
#include "operators/results.h"

namespace specens {

inline void require_device(const TorchTensor& tensor, const TorchTensor& first, const char* message) {
    require(tensor.is_cuda() == first.is_cuda() && tensor.is_cpu() == first.is_cpu() &&
                tensor.get_device_index() == first.get_device_index(),
            message);
}

// Calls move(arguments) to move slots and write the results: lengths and status.
template <typename Move>
void make_compact_kv(Results& results, const std::vector<TorchTensor>& caches, const TorchTensor& kept,
                     const TorchTensor& prefix_lens, const std::optional<TorchTensor>& num_kept,
                     const std::optional<TorchTensor>& block_table, const std::optional<TorchTensor>& slot_mapping,
                     int64_t batch_dim, int64_t slot_dim, const Move& move) {
    std::vector<Tensor> cache_views;
    cache_views.reserve(caches.size());
    for (const TorchTensor& cache : caches) {
        require_device(cache, caches[0], "caches must be on one device");
        cache_views.push_back(view_elements(cache));
    }
    Views views(5);
    const auto index = [&](const TorchTensor& tensor) {
        require_device(tensor, caches.empty() ? tensor : caches[0], "indices must be on the device of the caches");
        return views.add(tensor);
    };
    const auto optional = [&](const std::optional<TorchTensor>& tensor) { return tensor ? index(*tensor) : nullptr; };
    specens_kv_moves call = specens_kv_moves_init();
    call.caches = cache_views.data();
    call.num_caches = static_cast<int64_t>(caches.size());
    call.batch_dim = batch_dim;
    call.slot_dim = slot_dim;
    call.kept = index(kept);
    call.prefix_lens = index(prefix_lens);
    call.num_kept = optional(num_kept);
    call.block_table = optional(block_table);
    call.slot_mapping = optional(slot_mapping);
    call.lengths = results.add<int64_t>({prefix_lens.numel()}, ScalarType::Long, &prefix_lens);
    call.status = results.add<int32_t>({prefix_lens.numel()}, ScalarType::Int, &prefix_lens);
    results.finish(views.all(), cache_views);
    move(CompactArguments(call));
}

}  // namespace specens
