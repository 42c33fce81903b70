// The arguments of compact_kv, checked, as plain views.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "compact_kv/moves.h"
#include "parts/require.h"

namespace specens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The axes of a cache, counted from the end: -1 is the last one, whose elements lie together.
struct Axes {
    int64_t batch, slot;
};

struct OuterDim {
    int64_t size, stride;  // in bytes
};

// Takes the dimensions that continue a slot's bytes into it; merges those of the others that make one.
inline void merge(std::vector<OuterDim>& dims, int64_t& slot_bytes) {
    std::sort(dims.begin(), dims.end(), [](const OuterDim& a, const OuterDim& b) { return a.stride < b.stride; });
    std::vector<OuterDim> merged;
    for (const OuterDim& dim : dims) {
        if (merged.empty() && dim.stride == slot_bytes) {
            slot_bytes *= dim.size;
        } else if (!merged.empty() && dim.stride == merged.back().size * merged.back().stride) {
            merged.back().size *= dim.size;
        } else {
            merged.push_back(dim);
        }
    }
    dims = merged;
}

// The largest power of two up to 16 that divides all of them.
inline int64_t common_power(uintptr_t address, const std::vector<int64_t>& numbers) {
    int64_t bits = 16 | static_cast<int64_t>(address % 16);
    for (const int64_t number : numbers) {
        bits |= number;
    }
    return bits & -bits;
}

// The dimensions of a cache that are neither batch nor slot nor last, with their strides in bytes.
inline std::vector<OuterDim> outer_dims(const Tensor& cache, int64_t batch, int64_t slot) {
    std::vector<OuterDim> outer;
    for (int64_t dim = 0; dim < cache.dim() - 1; ++dim) {
        require(cache.size(dim) < 2 || cache.stride(dim) > 0, "caches must not be expanded");
        if (dim != batch && dim != slot && cache.size(dim) != 1) {
            outer.push_back({cache.size(dim), cache.stride(dim) * static_cast<int64_t>(cache.element_size())});
        }
    }
    return outer;
}

inline CacheView view_cache(const Tensor& cache, const Axes& axes) {
    const int64_t last = cache.dim() - 1, batch = cache.dim() + axes.batch, slot = cache.dim() + axes.slot;
    require(batch >= 0 && slot >= 0 && batch != slot && batch < last && slot < last,
            "caches, batch_dim and slot_dim do not fit together");
    CacheView view{};
    std::fill_n(view.outer_sizes, max_outer, int64_t{1});
    view.vector_bytes = 1;
    if (cache.numel() == 0) {
        return view;
    }
    require(cache.stride(last) == 1, "caches must be contiguous in the last dimension");
    const auto element = static_cast<int64_t>(cache.element_size());
    view.data = static_cast<char*>(cache.mutable_data_ptr());
    view.stride_block = cache.size(batch) == 1 ? 0 : cache.stride(batch) * element;
    view.stride_slot = cache.size(slot) == 1 ? 0 : cache.stride(slot) * element;
    view.slot_bytes = cache.size(last) * element;
    std::vector<OuterDim> outer = outer_dims(cache, batch, slot);
    merge(outer, view.slot_bytes);
    require(outer.size() <= max_outer, "caches have too many dimensions that do not lie together");
    view.rows = 1;
    std::vector<int64_t> numbers{view.stride_block, view.stride_slot, view.slot_bytes};
    for (size_t dim = 0; dim < outer.size(); ++dim) {
        view.rows *= view.outer_sizes[dim] = outer[dim].size;
        numbers.push_back(view.outer_strides[dim] = outer[dim].stride);
    }
    view.vector_bytes = common_power(reinterpret_cast<uintptr_t>(view.data), numbers);
    return view;
}

// A cache that came twice would be moved twice.
inline void require_distinct(const std::vector<CacheView>& views) {
    std::vector<const char*> begins;
    for (const CacheView& view : views) {
        if (view.rows > 0) {
            begins.push_back(view.data);
        }
    }
    std::sort(begins.begin(), begins.end());
    require(std::adjacent_find(begins.begin(), begins.end()) == begins.end(), "caches must not hold a tensor twice");
}

// Integers [batch] or [batch, columns] on the device of the caches.
inline IndexTable index_table(const std::optional<Tensor>& tensor, int64_t dims, int64_t batch, const Tensor& cache,
                              const char* name) {
    if (!tensor) {
        return {};
    }
    const bool wide = tensor->scalar_type() == ScalarType::Long;
    const bool same_device = tensor->is_cuda() == cache.is_cuda() && tensor->is_cpu() == cache.is_cpu() &&
                             tensor->get_device_index() == cache.get_device_index();
    if ((!wide && tensor->scalar_type() != ScalarType::Int) || tensor->dim() != dims || tensor->size(0) != batch ||
        !same_device) {
        throw std::invalid_argument(std::string(name) + " must be int64 or int32 with " + std::to_string(dims) +
                                    " dimensions, the first of size " + std::to_string(batch) +
                                    ", on the device of the caches");
    }
    IndexTable table{tensor->const_data_ptr(), true, wide, tensor->stride(0)};
    if (dims == 2) {
        table.stride_column = tensor->stride(1);
        table.columns = tensor->size(1);
    }
    return table;
}

struct CompactArguments {
    Moves moves{};
    std::vector<CacheView> caches;
    Tensor lengths, status;  // results

    CompactArguments(const std::vector<Tensor>& tensors, const Tensor& kept, const Tensor& prefix_lens,
                     const std::optional<Tensor>& num_kept, const std::optional<Tensor>& block_table,
                     const std::optional<Tensor>& slot_mapping, const Axes& axes)
        : lengths(new_result(prefix_lens, ScalarType::Long)), status(new_result(prefix_lens, ScalarType::Int)) {
        require(!tensors.empty(), "caches must hold at least one tensor");
        const int64_t batch = prefix_lens.numel();
        moves.batch = batch;
        moves.kept = index_table(kept, 2, batch, tensors[0], "kept");
        moves.prefix_lens = index_table(prefix_lens, 1, batch, tensors[0], "prefix_lens");
        moves.num_kept = index_table(num_kept, 1, batch, tensors[0], "num_kept");
        moves.block_table = index_table(block_table, 2, batch, tensors[0], "block_table");
        moves.slot_mapping = index_table(slot_mapping, 2, batch, tensors[0], "slot_mapping");
        require(!(block_table && slot_mapping), "block_table and slot_mapping exclude each other");
        moves.lengths = lengths.mutable_data_ptr<int64_t>();
        moves.status = status.mutable_data_ptr<int32_t>();
        read_caches(tensors, axes, block_table || slot_mapping);
    }

  private:
    static Tensor new_result(const Tensor& like, ScalarType dtype) {
        return torch::stable::new_empty(like, {like.numel()}, dtype);
    }
    void read_caches(const std::vector<Tensor>& tensors, const Axes& axes, bool paged) {
        caches.reserve(tensors.size());
        for (const Tensor& tensor : tensors) {
            caches.push_back(view_cache(tensor, axes));
            const int64_t blocks = tensor.size(tensor.dim() + axes.batch);
            const int64_t slots = tensor.size(tensor.dim() + axes.slot);
            const bool first = caches.size() == 1;
            require(
                tensor.get_device_index() == tensors[0].get_device_index() && tensor.is_cuda() == tensors[0].is_cuda(),
                "caches must be on one device");
            require(paged || blocks == moves.batch, "caches and prefix_lens differ in the batch");
            require(!paged || first || slots == moves.block_size, "caches must have one block size");
            moves.blocks = first ? blocks : std::min(moves.blocks, blocks);
            moves.block_size = first ? slots : std::min(moves.block_size, slots);
        }
        require_distinct(caches);
    }
};

}  // namespace specens
