// The arguments of compact_kv, checked, as plain views.
#pragma once

#include <algorithm>
#include <span>

#include "compact_kv/spans.h"
#include "parts/arguments.h"
#include "parts/inline_list.h"
#include "parts/scratch.h"

namespace specens {

// The axes of a cache, counted from the end: -1 is the last one, whose elements lie together.
struct Axes {
    int64_t batch, slot;
};

constexpr size_t usual_caches = 256;  // keys and values of 128 layers

struct OuterDim {
    int64_t size, stride;  // in bytes
};

using OuterDims = InlineList<OuterDim, 8>;

// Takes the dimensions that continue a slot's bytes into it; merges those of the others that make one.
inline OuterDims merged(OuterDims given, int64_t& slot_bytes) {
    std::ranges::sort(given.all(), {}, &OuterDim::stride);
    OuterDims outer;
    for (const OuterDim& dim : given.all()) {
        if (outer.empty() && dim.stride == slot_bytes) {
            slot_bytes *= dim.size;
        } else if (!outer.empty() && dim.stride == outer.back().size * outer.back().stride) {
            outer.back().size *= dim.size;
        } else {
            outer.push_back(dim);
        }
    }
    return outer;
}

// The dimensions of a cache that are neither batch nor slot nor last, with their strides in bytes.
inline OuterDims outer_dims(const Tensor& cache, int64_t batch, int64_t slot) {
    OuterDims outer;
    for (int64_t dim = 0; dim < cache.ndim - 1; ++dim) {
        require(size(cache, dim) < 2 || stride(cache, dim) > 0, "caches must not be expanded");
        if (dim != batch && dim != slot && size(cache, dim) != 1) {
            outer.push_back({size(cache, dim), stride(cache, dim) * element_size(cache)});
        }
    }
    return outer;
}

// The largest power of two up to 16 that divides a number with these bits.
inline int64_t common_power(int64_t bits) { return (bits | 16) & -(bits | 16); }

inline CacheView view_cache(const Tensor& cache, const Axes& axes) {
    const int64_t last = cache.ndim - 1, batch = cache.ndim + axes.batch, slot = cache.ndim + axes.slot;
    require(batch >= 0 && slot >= 0 && batch != slot && batch < last && slot < last,
            "caches, batch_dim and slot_dim do not fit together");
    CacheView view{};
    std::fill_n(view.outer_sizes, max_outer, int64_t{1});
    view.vector_bytes = 1;
    if (count_elements(cache) == 0) {
        return view;
    }
    require(stride(cache, last) == 1, "caches must be contiguous in the last dimension");
    const int64_t element = element_size(cache);
    view.data = static_cast<char*>(cache.data);
    view.stride_block = size(cache, batch) == 1 ? 0 : stride(cache, batch) * element;
    view.stride_slot = size(cache, slot) == 1 ? 0 : stride(cache, slot) * element;
    view.slot_bytes = size(cache, last) * element;
    const OuterDims outer = merged(outer_dims(cache, batch, slot), view.slot_bytes);
    require(outer.size() <= max_outer, "caches have too many dimensions that do not lie together");
    view.rows = 1;
    int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) % 16) | view.stride_block |
                   view.stride_slot | view.slot_bytes;
    for (size_t dim = 0; dim < outer.size(); ++dim) {
        view.rows *= view.outer_sizes[dim] = outer[dim].size;
        bits |= view.outer_strides[dim] = outer[dim].stride;
    }
    view.vector_bytes = common_power(bits);
    return view;
}

// A cache that came twice would be moved twice.
inline void require_distinct(std::span<const CacheView> views) {
    InlineList<const char*, usual_caches> begins;
    for (const CacheView& view : views) {
        if (view.rows > 0) {
            begins.push_back(view.data);
        }
    }
    const std::span<const char*> sorted = begins.all();
    std::ranges::sort(sorted);
    require(std::ranges::adjacent_find(sorted) == sorted.end(), "caches must not hold a tensor twice");
}

struct CompactArguments {
    Moves moves{};
    InlineList<CacheView, usual_caches> caches;

    explicit CompactArguments(const specens_kv_moves& call) {
        require(call.caches != nullptr && call.num_caches > 0, "caches must hold at least one tensor");
        require(call.kept != nullptr && call.prefix_lens != nullptr, "kept and prefix_lens are needed");
        const int64_t batch = count_elements(*call.prefix_lens);
        moves.batch = batch;
        moves.kept = {"kept", call.kept, {batch, any_size}};
        moves.prefix_lens = {"prefix_lens", call.prefix_lens, batch};
        moves.num_kept = {"num_kept", call.num_kept, batch};
        moves.block_table = {"block_table", call.block_table, {batch, any_size}};
        moves.slot_mapping = {"slot_mapping", call.slot_mapping, {batch, any_size}};
        require(!(moves.block_table.given && moves.slot_mapping.given),
                "block_table and slot_mapping exclude each other");
        moves.lengths = call.lengths;
        moves.status = call.status;
        read_caches({call.caches, static_cast<size_t>(call.num_caches)}, {call.batch_dim, call.slot_dim});
    }

  private:
    void read_caches(std::span<const Tensor> tensors, const Axes& axes) {
        const bool paged = moves.block_table.given || moves.slot_mapping.given;
        for (const Tensor& tensor : tensors) {
            caches.push_back(view_cache(tensor, axes));
            const int64_t blocks = size(tensor, tensor.ndim + axes.batch);
            const int64_t slots = size(tensor, tensor.ndim + axes.slot);
            const bool first = caches.size() == 1;
            require(paged || blocks == moves.batch, "caches and prefix_lens differ in the batch");
            require(!paged || first || slots == moves.block_size, "caches must have one block size");
            moves.blocks = first ? blocks : std::min(moves.blocks, blocks);
            moves.block_size = first ? slots : std::min(moves.block_size, slots);
        }
        require_distinct(caches.all());
    }
};

// On the CPU. Scratch memory is the pool's, without one the thread's.
void move_slots(const CompactArguments& arguments, ScratchPool<Spans>* pool = nullptr);

}  // namespace specens
