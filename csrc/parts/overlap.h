// Whether results would be written over what is still to be read.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "parts/require.h"

namespace specens {

// The bytes from a tensor's first element to its last, in whatever order they lie.
struct Extent {
    uintptr_t begin = 0, end = 0;

    explicit Extent(const torch::stable::Tensor& tensor) {
        int64_t last = 0;
        for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
            if (tensor.size(dim) == 0) {
                return;
            }
            last += (tensor.size(dim) - 1) * tensor.stride(dim);
        }
        const auto element = static_cast<int64_t>(tensor.element_size());
        begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
        end = begin + static_cast<uintptr_t>((last + 1) * element);
    }
    bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

inline void require_disjoint(const std::vector<torch::stable::Tensor>& out,
                             const std::vector<torch::stable::Tensor>& inputs) {
    std::vector<Extent> seen;
    seen.reserve(out.size() + inputs.size());
    for (const torch::stable::Tensor& input : inputs) {
        seen.emplace_back(input);
    }
    for (const torch::stable::Tensor& result : out) {
        const Extent own(result);
        for (const Extent& other : seen) {
            require(!own.meets(other), "a result shares memory with an argument or with another result");
        }
        seen.push_back(own);
    }
}

}  // namespace specens
