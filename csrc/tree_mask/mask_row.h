// One row of a tree's attention mask: the body that the CPU loop and the CUDA grid share.
#pragma once

#include "parts/integers.h"

namespace specens {

// The codes of `Layout` in the reference.
enum class MaskLayout : int64_t {
    full = SPECENS_MASK_FULL,
    tree = SPECENS_MASK_TREE,
    packed = SPECENS_MASK_PACKED,
    additive = SPECENS_MASK_ADDITIVE
};

constexpr uint32_t minus_infinity_float32 = 0xFF800000;
constexpr uint16_t minus_infinity_bfloat16 = 0xFF80, minus_infinity_float16 = 0xFC00;

struct MaskArguments {
    IntegerTable parents;                // [batch, nodes]
    IntegerRows prefix_lens, num_nodes;  // [batch]; without num_nodes all of them are
    int64_t batch, nodes, max_prefix;
    int64_t window;      // 0: none
    int64_t* positions;  // [batch, nodes], written
};

// An element a key.
template <typename Element>
struct ElementRow {
    Element* keys;
    Element visible, hidden;

    SPECENS_HOST_DEVICE void fill(int64_t begin, int64_t end, bool seen, int64_t lane, int64_t lanes) const {
        const Element value = seen ? visible : hidden;
        for (int64_t key = begin + lane; key < end; key += lanes) {
            keys[key] = value;
        }
    }
    SPECENS_HOST_DEVICE void show(int64_t key) const { keys[key] = visible; }
};

// A bit a key, the first one lowest. There is no prefix to fill, only nodes that are hidden at first.
struct BitRow {
    uint8_t* bytes;

    SPECENS_HOST_DEVICE void fill(int64_t begin, int64_t end, bool, int64_t lane, int64_t lanes) const {
        for (int64_t byte = begin / 8 + lane; byte < (end + 7) / 8; byte += lanes) {
            bytes[byte] = 0;
        }
    }
    SPECENS_HOST_DEVICE void show(int64_t key) const { bytes[key / 8] |= static_cast<uint8_t>(1u << (key % 8)); }
};

template <typename Element>
struct ElementRows {
    Element* mask;
    int64_t width;
    Element visible, hidden;
    SPECENS_HOST_DEVICE ElementRow<Element> operator[](int64_t row) const {
        return {mask + row * width, visible, hidden};
    }
};

struct BitRows {
    uint8_t* mask;
    int64_t width;
    SPECENS_HOST_DEVICE BitRow operator[](int64_t row) const { return {mask + row * width}; }
};

// The parent of a node; -2 for a node that has none in the tree.
SPECENS_HOST_DEVICE inline int64_t parent_of(const MaskArguments& arguments, int64_t request, int64_t node) {
    if (arguments.num_nodes.given() && node >= arguments.num_nodes(request)) {
        return -2;
    }
    const int64_t parent = arguments.parents(request, node);
    return parent >= -1 && parent < node ? parent : -2;
}

// The depth of a node, or -1 for padding: the way up does not end at the root position.
SPECENS_HOST_DEVICE inline int64_t depth_of(const MaskArguments& arguments, int64_t request, int64_t node) {
    int64_t depth = -1;
    while (node >= 0) {
        node = parent_of(arguments, request, node);
        ++depth;
    }
    return node == -1 ? depth : -1;
}

// Lanes write the row together: first all of them call fill_row, then, when every lane is through, one calls show_path.
template <typename Row>
SPECENS_HOST_DEVICE void fill_row(const MaskArguments& arguments, int64_t request, int64_t node, const Row& row,
                                  int64_t lane, int64_t lanes) {
    const int64_t depth = depth_of(arguments, request, node);
    const int64_t prefix_len = arguments.prefix_lens(request);
    const int64_t position = prefix_len + (depth > 0 ? depth : 0);
    int64_t end = depth < 0 || prefix_len < 0 ? 0 : prefix_len;
    end = end < arguments.max_prefix ? end : arguments.max_prefix;
    int64_t begin = arguments.window > 0 ? position - arguments.window + 1 : 0;
    begin = begin < 0 ? 0 : begin;
    begin = begin < end ? begin : end;
    row.fill(0, begin, false, lane, lanes);
    row.fill(begin, end, true, lane, lanes);
    row.fill(end, arguments.max_prefix + arguments.nodes, false, lane, lanes);
    if (lane == 0) {
        arguments.positions[request * arguments.nodes + node] = position;
    }
}

template <typename Row>
SPECENS_HOST_DEVICE void show_path(const MaskArguments& arguments, int64_t request, int64_t node, const Row& row) {
    row.show(arguments.max_prefix + node);
    if (depth_of(arguments, request, node) < 0) {
        return;
    }
    int64_t ancestor = parent_of(arguments, request, node);
    for (int64_t distance = 1; ancestor >= 0; ++distance) {
        if (arguments.window > 0 && distance >= arguments.window) {
            return;
        }
        row.show(arguments.max_prefix + ancestor);
        ancestor = parent_of(arguments, request, ancestor);
    }
}

// num_nodes: nullptr, where all of them are nodes.
inline MaskArguments mask_arguments(const Tensor& parents, const Tensor& prefix_lens, const Tensor* num_nodes,
                                    int64_t layout, int64_t max_prefix, int64_t window) {
    const auto code = static_cast<MaskLayout>(layout);
    const bool with_prefix = code == MaskLayout::full || code == MaskLayout::additive;
    if (layout < SPECENS_MASK_FULL || layout > SPECENS_MASK_ADDITIVE) {
        fail("layout", "SPECENS_MASK_FULL, ...", "the code " + std::to_string(layout));
    }
    if (max_prefix < 0 || (!with_prefix && max_prefix != 0)) {
        fail("max_prefix", with_prefix ? "0 or more" : "0 for this layout", std::to_string(max_prefix));
    }
    if (window < 0) {
        fail("window", "0 or more", std::to_string(window));
    }
    const int64_t batch = count_elements(prefix_lens);
    MaskArguments arguments{};
    arguments.parents = {"parents", &parents, {batch, any_size}};
    arguments.prefix_lens = {"prefix_lens", &prefix_lens, batch};
    arguments.num_nodes = {"num_nodes", num_nodes, batch};
    arguments.batch = batch;
    arguments.nodes = size(parents, 1);
    arguments.max_prefix = max_prefix;
    arguments.window = window;
    return arguments;
}

// Of a packed mask's row.
inline int64_t packed_bytes(const MaskArguments& arguments) { return (arguments.nodes + 7) / 8; }

// Calls launch(arguments, rows) to write a mask into `mask`, whose elements, of an additive one, have this dtype.
template <typename Launch>
void with_mask_rows(const MaskArguments& arguments, int64_t layout, int32_t dtype, void* mask, const Launch& launch) {
    const int64_t keys = arguments.max_prefix + arguments.nodes;
    if (layout == SPECENS_MASK_PACKED) {
        launch(arguments, BitRows{static_cast<uint8_t*>(mask), packed_bytes(arguments)});
    } else if (layout != SPECENS_MASK_ADDITIVE) {
        launch(arguments, ElementRows<uint8_t>{static_cast<uint8_t*>(mask), keys, 1, 0});
    } else if (dtype == SPECENS_FLOAT32) {
        launch(arguments, ElementRows<uint32_t>{static_cast<uint32_t*>(mask), keys, 0, minus_infinity_float32});
    } else if (dtype == SPECENS_FLOAT16 || dtype == SPECENS_BFLOAT16) {
        const uint16_t hidden = dtype == SPECENS_FLOAT16 ? minus_infinity_float16 : minus_infinity_bfloat16;
        launch(arguments, ElementRows<uint16_t>{static_cast<uint16_t*>(mask), keys, 0, hidden});
    } else {
        fail("dtype", "float32, float16 or bfloat16", "the code " + std::to_string(dtype));
    }
}

// On the CPU.
void write_mask(const MaskArguments& arguments, int64_t layout, int32_t dtype, void* mask);

}  // namespace specens
