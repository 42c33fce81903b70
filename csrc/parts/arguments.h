// The flat arguments of operators that read a target distribution, as plain views.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "parts/draw.h"
#include "parts/philox.h"
#include "parts/target_row.h"

namespace specens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void require(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

// An uninitialised tensor on the CPU; cheaper than a call of aten::empty through the dispatcher.
inline Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType dtype) {
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes.begin()[dim]) {
        strides[dim] = stride;
    }
    const int32_t code = dtype == ScalarType::Long  ? aoti_torch_dtype_int64()
                         : dtype == ScalarType::Int ? aoti_torch_dtype_int32()
                                                    : aoti_torch_dtype_float32();
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, code,
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

// Logits [batch, steps, vocab], or [batch, vocab] for one step, of one member or drafter; the vocabulary is contiguous.
struct LogitView {
    const char* data;
    LogitType type;
    int64_t element_size, steps, stride_batch, stride_step, vocab;

    explicit LogitView(const Tensor& logits) {
        require(logits.dim() == 2 || logits.dim() == 3, "logits must be [batch, vocab] or [batch, steps, vocab]");
        const int64_t last = logits.dim() - 1;
        require(logits.size(last) < 2 || logits.stride(last) == 1, "logits must have a contiguous vocabulary");
        const ScalarType dtype = logits.scalar_type();
        require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                "logits must be float32, bfloat16 or float16");
        type = dtype == ScalarType::Float      ? LogitType::float32
               : dtype == ScalarType::BFloat16 ? LogitType::bfloat16
                                               : LogitType::float16;
        element_size = type == LogitType::float32 ? 4 : 2;
        data = static_cast<const char*>(logits.const_data_ptr());
        stride_batch = logits.stride(0);
        steps = last == 2 ? logits.size(1) : 1;
        stride_step = last == 2 ? logits.stride(1) : 0;
        vocab = logits.size(last);
    }
    LogitRow row(int64_t request, int64_t step) const {
        return {data + (request * stride_batch + step * stride_step) * element_size, type, vocab};
    }
};

// One number for all requests, or one a request.
struct RequestNumber {
    double number;
    const float* rows = nullptr;
    int64_t stride = 0;

    RequestNumber(double value, const std::optional<Tensor>& tensor) : number(value) {
        if (tensor) {
            require(tensor->dim() == 1 && tensor->scalar_type() == ScalarType::Float,
                    "per-request parameters must be float32 [batch]");
            rows = tensor->const_data_ptr<float>();
            stride = tensor->stride(0);
        }
    }
    double operator()(int64_t request) const { return rows != nullptr ? double{rows[request * stride]} : number; }
};

inline const int64_t* optional_int64(const std::optional<Tensor>& tensor) {
    require(!tensor || (tensor->scalar_type() == ScalarType::Long && tensor->is_contiguous()),
            "lengths, indices, seeds and positions must be contiguous int64");
    return tensor ? tensor->const_data_ptr<int64_t>() : nullptr;
}

// Sampling parameters of a batch.
struct SamplingArguments {
    RequestNumber temperature, top_p, min_p;
    int64_t top_k;
    const int64_t* top_ks;  // [batch]
    bool min_p_first;

    SamplingArguments(double temperature_number, const std::optional<Tensor>& temperatures, int64_t count,
                      const std::optional<Tensor>& counts, double top_p_number, const std::optional<Tensor>& top_ps,
                      double min_p_number, const std::optional<Tensor>& min_ps, bool puts_min_p_first)
        : temperature(temperature_number, temperatures),
          top_p(top_p_number, top_ps),
          min_p(min_p_number, min_ps),
          top_k(count),
          top_ks(optional_int64(counts)),
          min_p_first(puts_min_p_first) {}

    FilterParameters filter(int64_t request) const {
        const int64_t count = top_ks != nullptr ? top_ks[request] : top_k;
        return {std::max<int64_t>(count, 0), top_p(request), min_p(request), min_p_first};
    }
    bool valid(int64_t request) const {
        const double heat = temperature(request);
        const double mass = top_p(request);
        const double share = min_p(request);
        return std::isfinite(heat) && heat >= 0 && mass > 0 && mass <= 1 && share >= 0 && share <= 1;
    }
};

// Random numbers: given, or from seeds and positions, or 0 where neither is (all requests are greedy).
struct CoinView {
    const double* given;  // [batch, width]
    int64_t width;
    const int64_t *seeds, *positions;

    CoinView(const std::optional<Tensor>& uniforms, const std::optional<Tensor>& seed_tensor,
             const std::optional<Tensor>& position_tensor, int64_t coins_per_request)
        : given(nullptr),
          width(coins_per_request),
          seeds(optional_int64(seed_tensor)),
          positions(optional_int64(position_tensor)) {
        if (uniforms) {
            require(uniforms->scalar_type() == ScalarType::Double && uniforms->is_contiguous(),
                    "uniforms must be contiguous float64");
            given = uniforms->const_data_ptr<double>();
        }
    }
    // `index` is the coin's place among the given ones.
    double operator()(int64_t request, int64_t index, int64_t step, int64_t stream) const {
        if (given != nullptr) {
            return given[request * width + index];
        }
        return seeds != nullptr ? philox_coin(seeds[request], positions[request], step, stream) : 0.0;
    }
    bool valid(int64_t request, int64_t index) const {
        const double coin = given != nullptr ? given[request * width + index] : 0.0;
        return coin >= 0 && coin < 1;
    }
};

// The target distribution of a batch.
struct TargetArguments {
    std::vector<LogitView> members;
    EnsembleKind kind;
    std::vector<float> weights;
    const float* weight_rows = nullptr;  // [batch, members]
    double plausibility;
    bool filter_members;
    SamplingArguments sampling;
    int64_t batch, steps, vocab;

    TargetArguments(const std::vector<Tensor>& member_logits, int64_t ensemble, const std::vector<double>& numbers,
                    const std::optional<Tensor>& rows, double plausibility_share, bool filters_members,
                    const SamplingArguments& sampling_arguments)
        : kind(static_cast<EnsembleKind>(ensemble)),
          weights(numbers.begin(), numbers.end()),
          plausibility(plausibility_share),
          filter_members(filters_members),
          sampling(sampling_arguments) {
        require(!member_logits.empty() && numbers.size() == member_logits.size(), "one weight a member is needed");
        vocab = 0;
        for (const Tensor& logits : member_logits) {
            members.emplace_back(logits);
            vocab = std::max(vocab, members.back().vocab);
        }
        batch = member_logits[0].size(0);
        steps = members[0].steps;
        if (rows) {
            require(rows->scalar_type() == ScalarType::Float && rows->is_contiguous(),
                    "weight_rows must be contiguous float32 [batch, members]");
            weight_rows = rows->const_data_ptr<float>();
        }
    }
    EnsembleParameters parameters(int64_t request) const {
        const float* own = weight_rows != nullptr ? weight_rows + request * members.size() : weights.data();
        return {kind, own, plausibility, sampling.temperature(request), sampling.filter(request), filter_members};
    }
    // Whether a request's parameters and weights are in range.
    bool valid(int64_t request) const {
        const EnsembleParameters own = parameters(request);
        double sum = 0;
        for (size_t member = 0; member < members.size(); ++member) {
            if (!std::isfinite(own.weights[member]) || (kind == EnsembleKind::mixture && own.weights[member] < 0)) {
                return false;
            }
            sum += own.weights[member];
        }
        constexpr double weight_sum_tolerance = 1e-3;
        return sampling.valid(request) && (kind != EnsembleKind::mixture || std::abs(sum - 1) <= weight_sum_tolerance);
    }
    void rows(int64_t request, int64_t step, std::vector<LogitRow>& out) const {
        out.clear();
        for (const LogitView& member : members) {
            out.push_back(member.row(request, step));
        }
    }
};

// Draws from a target row itself.
inline int64_t draw_from(const TargetRow& target, double coin, std::vector<double>& tile_masses) {
    tile_masses.resize(target.tiles());
    for (int64_t tile = 0; tile < target.tiles(); ++tile) {
        tile_masses[tile] = target.tile_mass(tile);
    }
    return draw(tile_masses, target.vocab(), coin,
                [&](int64_t tile, float* masses) { target.write_tile(tile, masses); });
}

}  // namespace specens
