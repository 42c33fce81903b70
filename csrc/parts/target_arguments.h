// The arguments that make the target distributions of a batch, and its coins.
#pragma once

#include <cmath>
#include <vector>

#include "parts/arguments.h"
#include "parts/draw.h"
#include "parts/philox.h"
#include "parts/target_row.h"

namespace specens {

// Sampling parameters of a batch.
struct SamplingArguments {
    RequestNumber temperature;
    const int64_t* top_ks;  // [batch]
    RequestNumber top_p, min_p;
    int64_t top_k;
    bool min_p_first;

    explicit SamplingArguments(ArgumentReader& reader)
        : temperature(reader),
          top_ks(optional_int64(reader.tensor())),
          top_p(reader),
          min_p(reader),
          top_k(reader.integer()),
          min_p_first(reader.integer() != 0) {}

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

// Logit processing of a batch.
struct ProcessingArguments {
    TokenTable bias_tokens;
    const float* bias_values;  // [batch, n]
    RequestNumber repetition, frequency, presence;
    const int64_t* min_tokens_rows;  // [batch]
    TokenTable end_tokens, prompt_tokens, output_tokens;
    int64_t min_tokens;

    explicit ProcessingArguments(ArgumentReader& reader)
        : bias_tokens(optional_tokens(reader.tensor())),
          bias_values(optional_float(reader.tensor())),
          repetition(reader),
          frequency(reader),
          presence(reader),
          min_tokens_rows(optional_int64(reader.tensor())),
          end_tokens(optional_tokens(reader.tensor())),
          prompt_tokens(optional_tokens(reader.tensor())),
          output_tokens(optional_tokens(reader.tensor())),
          min_tokens(reader.integer()) {}

    // Whether any logit may be changed.
    bool active() const {
        const bool penalises = !repetition.always(1) || !frequency.always(0) || !presence.always(0);
        return penalises || bias_tokens.width > 0 || end_tokens.width > 0;
    }
    RequestProcessing of(int64_t request, int64_t vocab) const {
        return {bias_tokens,
                end_tokens,
                prompt_tokens,
                output_tokens,
                bias_values + request * bias_tokens.width,
                static_cast<float>(repetition(request)),
                static_cast<float>(frequency(request)),
                static_cast<float>(presence(request)),
                min_tokens_rows != nullptr ? min_tokens_rows[request] : min_tokens,
                vocab};
    }
    bool valid(int64_t request) const {
        return std::isfinite(repetition(request)) && repetition(request) > 0 && std::isfinite(frequency(request)) &&
               std::isfinite(presence(request));
    }
};

// Random numbers: given, or from seeds and positions, or 0 where neither is (all requests are greedy).
struct CoinView {
    const double* given = nullptr;  // [batch, width]
    int64_t width;
    const int64_t *seeds, *positions;

    CoinView(ArgumentReader& reader, int64_t coins_per_request) : width(coins_per_request) {
        if (const Tensor* uniforms = reader.tensor()) {
            require(uniforms->scalar_type() == ScalarType::Double && uniforms->is_contiguous(),
                    "uniforms must be contiguous float64");
            given = uniforms->const_data_ptr<double>();
        }
        seeds = optional_int64(reader.tensor());
        positions = optional_int64(reader.tensor());
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

// The target distributions of a batch.
struct TargetArguments {
    std::vector<LogitView> members;
    const float* weight_rows;    // [batch, members]
    const int64_t* row_offsets;  // [batch + 1], or nullptr where rows are not packed
    const Tensor* allowed;       // [batch, steps, words], [rows, words] where they are packed
    EnsembleKind kind;
    bool filter_members;
    double plausibility;
    SamplingArguments sampling;
    ProcessingArguments processing;
    std::vector<float> weights;
    int64_t batch, steps, vocab;

    TargetArguments(const std::vector<Tensor>& member_logits, ArgumentReader& reader)
        : weight_rows(optional_float(reader.tensor())),
          row_offsets(offsets(reader.tensor())),
          allowed(reader.tensor()),
          kind(static_cast<EnsembleKind>(reader.integer())),
          filter_members(reader.integer() != 0),
          plausibility(reader.number()),
          sampling(reader),
          processing(reader) {
        require(!member_logits.empty(), "one member is needed");
        vocab = 0;
        members.reserve(member_logits.size());
        for (const Tensor& logits : member_logits) {
            members.emplace_back(logits, row_offsets != nullptr);
            vocab = std::max(vocab, members.back().vocab);
        }
        batch = row_offsets != nullptr ? batch : member_logits[0].size(0);
        steps = members[0].steps;
        require(allowed == nullptr || allowed->scalar_type() == ScalarType::Int, "allowed must be int32");
    }
    // The weights follow all other numbers, and after them what belongs to the rule.
    void read_weights(ArgumentReader& reader) {
        for (size_t member = 0; member < members.size(); ++member) {
            weights.push_back(static_cast<float>(reader.number()));
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
        return sampling.valid(request) && processing.valid(request) &&
               (kind != EnsembleKind::mixture || std::abs(sum - 1) <= weight_sum_tolerance);
    }
    bool edited() const { return allowed != nullptr || processing.active(); }
    TokenMask mask(int64_t request, int64_t step) const {
        if (allowed == nullptr) {
            return {};
        }
        const auto [outer, inner] = place(request, step);
        const int64_t last = allowed->dim() - 1;
        const int64_t offset = row_offsets != nullptr || last == 1
                                   ? (outer + inner) * allowed->stride(0)
                                   : outer * allowed->stride(0) + inner * allowed->stride(1);
        return {allowed->const_data_ptr<int32_t>() + offset, allowed->size(last)};
    }
    LogitRow row(int64_t member, int64_t request, int64_t step, const RowEdits* edits) const {
        const auto [outer, inner] = place(request, step);
        LogitRow row = members[member].row(outer, inner);
        row.edits = edits;
        return row;
    }
    void rows(int64_t request, int64_t step, const RowEdits* edits, std::vector<LogitRow>& out) const {
        out.clear();
        for (size_t member = 0; member < members.size(); ++member) {
            out.push_back(row(static_cast<int64_t>(member), request, step, edits));
        }
    }

  private:
    const int64_t* offsets(const Tensor* tensor) {
        batch = tensor != nullptr ? tensor->size(0) - 1 : 0;
        return optional_int64(tensor);
    }
    std::pair<int64_t, int64_t> place(int64_t request, int64_t step) const {
        return row_offsets != nullptr ? std::pair(int64_t{0}, row_offsets[request] + step) : std::pair(request, step);
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
