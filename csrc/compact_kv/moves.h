// Which slots of a request move where, for the CPU loop and the CUDA grid, and the move as the threads of a grid do it.
#pragma once

#include <cstdint>

#include "parts/integers.h"
#include "parts/status.h"

namespace specens {

// Where a slot lies: in a dense cache a request is a block.
struct Slot {
    int64_t block, offset;
};

struct Moves {
    IntegerTable kept;                  // [batch, width]
    IntegerRows prefix_lens, num_kept;  // [batch]
    IntegerTable block_table;           // [batch, blocks of a request]
    IntegerTable slot_mapping;          // [batch, nodes]
    int64_t batch, blocks, block_size;  // the smallest of all caches
    int64_t* lengths;                   // [batch], written
    int32_t* status;                    // [batch], written
};

constexpr int max_outer = 4;

// A cache as bytes. A row is what one request has in all slots, but for the bytes of a slot that lie together.
struct CacheView {
    char* data;
    int64_t stride_block, stride_slot, slot_bytes;
    int64_t rows, outer_sizes[max_outer], outer_strides[max_outer];  // innermost first
    int64_t vector_bytes;                                            // every address and size is a multiple of it

    SPECENS_HOST_DEVICE char* row(int64_t index) const {
        char* begin = data;
        for (int dim = 0; dim < max_outer; ++dim) {
            begin += index % outer_sizes[dim] * outer_strides[dim];
            index /= outer_sizes[dim];
        }
        return begin;
    }
    SPECENS_HOST_DEVICE int64_t offset(const Slot& slot) const {
        return slot.block * stride_block + slot.offset * stride_slot;
    }
};

// The slot of a node of a request whose prefix_len is in range; false where it has none. No sum overflows.
SPECENS_HOST_DEVICE inline bool find_slot(const Moves& moves, int64_t request, int64_t node, Slot& slot) {
    if (node < 0 || moves.block_size == 0) {
        return false;
    }
    if (moves.slot_mapping.given) {
        const int64_t index = node < moves.slot_mapping.columns ? moves.slot_mapping(request, node) : -1;
        slot = {index / moves.block_size, index % moves.block_size};
        return index >= 0 && slot.block < moves.blocks;
    }
    const int64_t prefix_len = moves.prefix_lens(request);
    const int64_t slots = moves.block_table.given ? moves.block_table.columns * moves.block_size : moves.block_size;
    if (node >= slots - prefix_len) {
        return false;
    }
    const int64_t position = prefix_len + node;
    if (!moves.block_table.given) {
        slot = {request, position};
        return true;
    }
    slot = {moves.block_table(request, position / moves.block_size), position % moves.block_size};
    return slot.block >= 0 && slot.block < moves.blocks;
}

// Lanes count together: the least of what they return is the number of nodes to keep.
SPECENS_HOST_DEVICE inline int64_t count_kept(const Moves& moves, int64_t request, int64_t lane, int64_t lanes) {
    if (moves.num_kept.given()) {
        return moves.num_kept(request);
    }
    for (int64_t index = lane; index < moves.kept.columns; index += lanes) {
        if (moves.kept(request, index) < 0) {
            return index;
        }
    }
    return moves.kept.columns;
}

constexpr int64_t max_prefix_len = int64_t{1} << 62;

// Whether a lane finds nothing wrong in its part of a request. Nodes must ascend: then a move goes to a slot that is
// read no more, and the order of the path is the order of safe moves.
SPECENS_HOST_DEVICE inline bool is_sound(const Moves& moves, int64_t request, int64_t count, int64_t lane,
                                         int64_t lanes) {
    const int64_t prefix_len = moves.prefix_lens(request);
    if (count < 0 || count > moves.kept.columns || prefix_len < 0 || prefix_len > max_prefix_len) {
        return false;
    }
    Slot slot;
    for (int64_t index = lane; index < count; index += lanes) {
        const int64_t node = moves.kept(request, index);
        const int64_t before = index > 0 ? moves.kept(request, index - 1) : -1;
        if (node <= before || !find_slot(moves, request, node, slot) || !find_slot(moves, request, index, slot)) {
            return false;
        }
    }
    return true;
}

SPECENS_HOST_DEVICE inline void write_result(const Moves& moves, int64_t request, int64_t count, bool sound) {
    moves.lengths[request] = moves.prefix_lens(request) + (sound ? count : 0);
    moves.status[request] = sound ? status_ok : status_invalid_parameter;
}

// The move that fills the slot of a sound request's node `target`. Where nothing moves, both slots are one.
struct Move {
    Slot from, to;

    SPECENS_HOST_DEVICE bool moves() const { return from.block != to.block || from.offset != to.offset; }
};

SPECENS_HOST_DEVICE inline Move find_move(const Moves& moves, int64_t request, int64_t target) {
    Move move{};
    find_slot(moves, request, moves.kept(request, target), move.from);
    find_slot(moves, request, target, move.to);
    return move;
}

// As many bytes as one instruction moves, whatever they are the bytes of.
template <int bytes>
struct Vector;
template <>
struct __attribute__((may_alias, aligned(16))) Vector<16> {
    uint64_t low, high;
};
template <>
struct __attribute__((may_alias)) Vector<8> {
    uint64_t value;
};
template <>
struct __attribute__((may_alias)) Vector<4> {
    uint32_t value;
};
template <>
struct __attribute__((may_alias)) Vector<2> {
    uint16_t value;
};
template <>
struct __attribute__((may_alias)) Vector<1> {
    uint8_t value;
};

// Does moves that follow each other, for one column of bytes. Several slots are read before one is written, for the
// sake of latency: all of them lie at or after the slots that were written before.
template <int bytes>
SPECENS_HOST_DEVICE void move_column(const Move* moves, int64_t count, const CacheView& cache, char* column) {
    constexpr int together = 8;
    for (int64_t first = 0; first < count; first += together) {
        Vector<bytes> held[together];
        for (int index = 0; index < together; ++index) {
            if (first + index < count && moves[first + index].moves()) {
                held[index] = *reinterpret_cast<const Vector<bytes>*>(column + cache.offset(moves[first + index].from));
            }
        }
        for (int index = 0; index < together; ++index) {
            if (first + index < count && moves[first + index].moves()) {
                *reinterpret_cast<Vector<bytes>*>(column + cache.offset(moves[first + index].to)) = held[index];
            }
        }
    }
}

// A thread for every column of every row.
SPECENS_HOST_DEVICE inline int64_t thread_count(const CacheView& cache) {
    return cache.rows * (cache.slot_bytes / cache.vector_bytes);
}

// Does moves that follow each other, for the column of one thread.
SPECENS_HOST_DEVICE inline void move_part(const Move* moves, int64_t count, const CacheView& cache, int64_t thread) {
    if (thread >= thread_count(cache)) {
        return;
    }
    const int64_t columns = cache.slot_bytes / cache.vector_bytes;
    char* column = cache.row(thread / columns) + thread % columns * cache.vector_bytes;
    switch (cache.vector_bytes) {
        case 16:
            return move_column<16>(moves, count, cache, column);
        case 8:
            return move_column<8>(moves, count, cache, column);
        case 4:
            return move_column<4>(moves, count, cache, column);
        case 2:
            return move_column<2>(moves, count, cache, column);
        default:
            return move_column<1>(moves, count, cache, column);
    }
}

}  // namespace specens
