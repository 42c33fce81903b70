// One row of a tree's attention mask: the body that the CPU loop and the CUDA grid share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "parts/philox.h"

namespace specens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The codes of `Layout` in the reference.
enum class MaskLayout : int64_t { full, tree, packed, additive };

constexpr uint32_t minus_infinity_float32 = 0xFF800000;
constexpr uint16_t minus_infinity_bfloat16 = 0xFF80, minus_infinity_float16 = 0xFC00;

struct MaskArguments {
    const int64_t* parents;      // [batch, nodes]
    const int64_t* prefix_lens;  // [batch]
    const int64_t* num_nodes;    // [batch], null: all
    int64_t parents_stride_batch, parents_stride_node, prefix_lens_stride, num_nodes_stride;
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
    if (arguments.num_nodes != nullptr && node >= arguments.num_nodes[request * arguments.num_nodes_stride]) {
        return -2;
    }
    const int64_t parent =
        arguments.parents[request * arguments.parents_stride_batch + node * arguments.parents_stride_node];
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
    const int64_t prefix_len = arguments.prefix_lens[request * arguments.prefix_lens_stride];
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

inline const int64_t* int64_data(const Tensor& tensor, int64_t dims, int64_t batch, const char* name) {
    if (tensor.dim() != dims || tensor.size(0) != batch || tensor.scalar_type() != ScalarType::Long) {
        throw std::invalid_argument(std::string(name) + " must be int64 with " + std::to_string(dims) +
                                    " dimensions, the first of size " + std::to_string(batch));
    }
    return tensor.const_data_ptr<int64_t>();
}

inline MaskArguments mask_arguments(const Tensor& parents, const Tensor& prefix_lens,
                                    const std::optional<Tensor>& num_nodes, int64_t max_prefix, int64_t window) {
    const int64_t batch = prefix_lens.numel();
    MaskArguments arguments{};
    arguments.parents = int64_data(parents, 2, batch, "parents");
    arguments.parents_stride_batch = parents.stride(0);
    arguments.parents_stride_node = parents.stride(1);
    arguments.prefix_lens = int64_data(prefix_lens, 1, batch, "prefix_lens");
    arguments.prefix_lens_stride = prefix_lens.stride(0);
    if (num_nodes) {
        arguments.num_nodes = int64_data(*num_nodes, 1, batch, "num_nodes");
        arguments.num_nodes_stride = num_nodes->stride(0);
    }
    arguments.batch = batch;
    arguments.nodes = parents.size(1);
    arguments.max_prefix = max_prefix;
    arguments.window = window;
    return arguments;
}

inline void require_mask_layout(int64_t layout, int64_t max_prefix, int64_t window, ScalarType dtype) {
    const auto code = static_cast<MaskLayout>(layout);
    const bool with_prefix = code == MaskLayout::full || code == MaskLayout::additive;
    const bool dtype_known = dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
    if (layout < 0 || layout > 3 || max_prefix < 0 || (!with_prefix && max_prefix != 0) || window < 0 || !dtype_known) {
        throw std::invalid_argument("layout, max_prefix, window or dtype is out of range");
    }
}

// Calls launch(arguments, rows) to write the mask and the positions, and returns both.
template <typename Launch>
std::tuple<Tensor, Tensor> make_tree_mask(const Tensor& parents, const Tensor& prefix_lens,
                                          const std::optional<Tensor>& num_nodes, int64_t layout_code,
                                          int64_t max_prefix, int64_t window, ScalarType dtype, const Launch& launch) {
    require_mask_layout(layout_code, max_prefix, window, dtype);
    const auto layout = static_cast<MaskLayout>(layout_code);
    MaskArguments arguments = mask_arguments(parents, prefix_lens, num_nodes, max_prefix, window);
    const int64_t batch = arguments.batch, nodes = arguments.nodes;
    const Tensor positions = torch::stable::new_empty(parents, {batch, nodes}, ScalarType::Long);
    arguments.positions = positions.mutable_data_ptr<int64_t>();
    const int64_t keys = max_prefix + nodes, packed_keys = (keys + 7) / 8;
    if (layout == MaskLayout::packed) {
        const Tensor mask = torch::stable::new_empty(parents, {batch, nodes, packed_keys}, ScalarType::Byte);
        launch(arguments, BitRows{mask.mutable_data_ptr<uint8_t>(), packed_keys});
        return {mask, positions};
    }
    if (layout != MaskLayout::additive) {
        const Tensor mask = torch::stable::new_empty(parents, {batch, nodes, keys}, ScalarType::Bool);
        launch(arguments, ElementRows<uint8_t>{static_cast<uint8_t*>(mask.mutable_data_ptr()), keys, 1, 0});
        return {mask, positions};
    }
    const Tensor mask = torch::stable::new_empty(parents, {batch, 1, nodes, keys}, dtype);
    void* data = mask.mutable_data_ptr();
    if (dtype == ScalarType::Float) {
        launch(arguments, ElementRows<uint32_t>{static_cast<uint32_t*>(data), keys, 0, minus_infinity_float32});
    } else {
        const uint16_t hidden = dtype == ScalarType::Half ? minus_infinity_float16 : minus_infinity_bfloat16;
        launch(arguments, ElementRows<uint16_t>{static_cast<uint16_t*>(data), keys, 0, hidden});
    }
    return {mask, positions};
}

}  // namespace specens
