// The arguments that make the target distributions of a batch, and its coins.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "parts/arguments.h"
#include "parts/draw.h"
#include "parts/philox.h"
#include "parts/target_row.h"
#include "sample/rows.h"

namespace specens {

constexpr double largest_top_p = 1 - 0x1p-20;  // above it top-p is off: sums of float32 powers could not tell

// Sampling parameters of a batch.
struct SamplingArguments {
    RequestNumber temperature;
    IntegerRows top_ks;
    RequestNumber top_p, min_p;
    int64_t top_k;
    bool min_p_first;

    SamplingArguments(ArgumentReader& reader, int64_t batch)
        : temperature(reader.group(), batch, 1),
          top_ks(reader.tensor(), batch),
          top_p(reader, batch, 1),
          min_p(reader, batch, 0),
          top_k(reader.integer(0)),
          min_p_first(reader.integer(0) != 0) {}

    FilterParameters filter(int64_t request) const {
        const int64_t count = top_ks.given() ? top_ks(request) : top_k;
        const double mass = top_p(request);
        return {std::max<int64_t>(count, 0), mass > largest_top_p && mass <= 1 ? 1 : mass, min_p(request), min_p_first};
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
    bool active;  // whether any logit may be changed
    TokenTable bias_tokens;
    const float* bias_values = nullptr;  // [batch, n]
    RequestNumber repetition, frequency, presence;
    IntegerRows min_tokens_rows;
    TokenTable end_tokens, prompt_tokens, output_tokens;
    int64_t min_tokens = 0;

    ProcessingArguments(ArgumentReader& reader, int64_t batch)
        : active(reader.has_group()),
          bias_tokens(table(reader.group(), batch)),
          bias_values(optional_float(reader.tensor(), batch, bias_tokens.width)),
          repetition(reader, batch, 1),
          frequency(reader, batch, 0),
          presence(reader, batch, 0),
          min_tokens_rows(reader.tensor(), batch),
          end_tokens(table(reader, batch)),
          prompt_tokens(table(reader, batch)),
          output_tokens(table(reader, batch)),
          min_tokens(reader.integer(0)) {
        require(bias_values != nullptr || bias_tokens.width == 0 || batch == 0, "tokens of a bias need values");
    }
    RequestProcessing of(int64_t request, int64_t vocab) const {
        return {bias_tokens,
                end_tokens,
                prompt_tokens,
                output_tokens,
                bias_values + request * bias_tokens.width,
                repetition(request),
                frequency(request),
                presence(request),
                min_tokens_rows.given() ? min_tokens_rows(request) : min_tokens,
                vocab};
    }
    bool valid(int64_t request) const {
        return std::isfinite(repetition(request)) && repetition(request) > 0 && std::isfinite(frequency(request)) &&
               std::isfinite(presence(request));
    }

  private:
    static TokenTable table(ArgumentReader& reader, int64_t batch) {
        return optional_integers(reader.tensor(), 2, batch);
    }
};

// Random numbers: given, or from seeds and positions, or 0 where neither is (all requests are greedy).
struct CoinView {
    const Tensor* uniforms;
    IntegerRows seeds, positions;
    const void* given = nullptr;  // [batch, width], or [batch]
    bool wide = true;             // float64, else float32
    int64_t stride_request = 0, stride_index = 0;

    CoinView(ArgumentReader& reader, int64_t batch, int64_t width)
        : uniforms(reader.group().tensor()), seeds(reader.tensor(), batch), positions(reader.tensor(), batch) {
        if (uniforms != nullptr) {
            wide = uniforms->scalar_type() == ScalarType::Double;
            require(wide || uniforms->scalar_type() == ScalarType::Float, "uniforms must be float64 or float32");
            const int64_t last = uniforms->dim() - 1;
            require((last == 1 || (last == 0 && width == 1)) && uniforms->size(0) == batch &&
                        (last == 0 || uniforms->size(1) == width),
                    "uniforms have another shape");
            given = uniforms->const_data_ptr();
            stride_request = uniforms->stride(0);
            stride_index = last == 1 ? uniforms->stride(1) : 0;
        }
        require(seeds.given() == positions.given() && !(seeds.given() && uniforms != nullptr),
                "either uniforms or seeds and positions");
        require(!seeds.given() || (seeds.table.wide && positions.table.wide), "seeds and positions must be int64");
    }
    bool any() const { return uniforms != nullptr || seeds.given(); }
    // Of a token's noise, at so many positions after the first; none where all requests are greedy.
    std::optional<NoiseKey> noise_key(int64_t request, int64_t step) const {
        if (!seeds.given()) {
            return std::nullopt;
        }
        return NoiseKey{static_cast<uint64_t>(seeds(request)),
                        static_cast<uint64_t>(positions(request)) + static_cast<uint64_t>(step)};
    }
    // `index` is the coin's place among the given ones.
    double operator()(int64_t request, int64_t index, int64_t step, int64_t stream) const {
        if (uniforms != nullptr) {
            const int64_t place = request * stride_request + index * stride_index;
            return wide ? static_cast<const double*>(given)[place] : double{static_cast<const float*>(given)[place]};
        }
        return seeds.given() ? philox_coin(seeds(request), positions(request), step, stream) : 0.0;
    }
    bool valid(int64_t request, int64_t index) const {
        const double coin = uniforms != nullptr ? (*this)(request, index, 0, 0) : 0.0;
        return coin >= 0 && coin < 1;
    }
};

// The target distributions of a batch.
struct TargetArguments {
    std::vector<LogitView> members;
    const Tensor* weight_tensor;
    const Tensor* offset_tensor;
    const Tensor* allowed;  // [batch, steps, words], [rows, words] where they are packed
    int64_t batch;
    IntegerRows row_offsets;   // [batch + 1] where rows are packed
    const float* weight_rows;  // [batch, members]
    EnsembleKind kind;
    bool filter_members;
    double plausibility;
    SamplingArguments sampling;
    ProcessingArguments processing;
    std::vector<double> weights;
    int64_t steps, vocab;

    explicit TargetArguments(ArgumentReader& reader)
        : weight_tensor(reader.group().tensor()),
          offset_tensor(reader.tensor()),
          allowed(reader.tensor()),
          batch(batch_of(reader.member_logits(), offset_tensor)),
          row_offsets(offset_tensor, batch + 1),
          weight_rows(optional_float(weight_tensor, batch, static_cast<int64_t>(reader.member_logits().size()))),
          kind(reader.code(EnsembleKind::single)),
          filter_members(reader.integer(0) != 0),
          plausibility(reader.number(0)),
          sampling(reader, batch),
          processing(reader, batch) {
        const std::span<const Tensor> member_logits = reader.member_logits();
        vocab = 0;
        members.reserve(member_logits.size());
        for (const Tensor& logits : member_logits) {
            members.emplace_back(logits, packed());
            require(same_leading(logits, member_logits[0]), "members must be of the same batch and steps");
            vocab = std::max(vocab, members.back().vocab);
        }
        require(!packed() || member_logits[0].dim() == 2, "packed logits must be [rows, vocab]");
        require(kind != EnsembleKind::single || members.size() == 1, "several members need an ensemble");
        steps = members[0].steps;
        if (allowed != nullptr) {
            const int64_t last = allowed->dim() - 1;
            require(same_leading(*allowed, member_logits[0]), "allowed must have a row for each row of logits");
            require(allowed->scalar_type() == ScalarType::Int && allowed->size(last) > 0 &&
                        (allowed->size(last) == 1 || allowed->stride(last) == 1 || allowed->numel() == 0),
                    "allowed must be int32 with contiguous words");
        }
    }
    bool packed() const { return offset_tensor != nullptr; }
    // The weights of an ensemble, unless they are a tensor, follow all groups, and after them what belongs to the rule.
    void read_weights(ArgumentReader& reader) {
        const bool given = kind != EnsembleKind::single && weight_tensor == nullptr;
        for (size_t member = 0; member < members.size(); ++member) {
            weights.push_back(given ? reader.weight() : 1.0);
        }
    }
    EnsembleParameters parameters(int64_t request) const {
        const float* own = weight_rows != nullptr ? weight_rows + request * members.size() : nullptr;
        return {
            kind,          {own, weights.data()}, plausibility, sampling.temperature(request), sampling.filter(request),
            filter_members};
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
    bool edited() const { return allowed != nullptr || processing.active; }
    // Whether every request is known to be greedy.
    bool greedy() const { return sampling.temperature.always(0); }
    TokenMask mask(int64_t request, int64_t step) const {
        if (allowed == nullptr) {
            return {};
        }
        const auto [outer, inner] = place(request, step);
        const int64_t last = allowed->dim() - 1;
        const int64_t offset = packed() || last == 1 ? (outer + inner) * allowed->stride(0)
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
    static int64_t batch_of(std::span<const Tensor> member_logits, const Tensor* offsets) {
        require(member_logits[0].dim() >= 2, "members must be [batch, steps, vocab]");
        require(offsets == nullptr || (offsets->dim() == 1 && offsets->size(0) > 0), "row_offsets must be [batch + 1]");
        return offsets != nullptr ? offsets->size(0) - 1 : member_logits[0].size(0);
    }
    static bool same_leading(const Tensor& tensor, const Tensor& first) {
        bool same = tensor.dim() == first.dim();
        for (int64_t dim = 0; same && dim + 1 < first.dim(); ++dim) {
            same = tensor.size(dim) == first.size(dim);
        }
        return same;
    }
    std::pair<int64_t, int64_t> place(int64_t request, int64_t step) const {
        return packed() ? std::pair(int64_t{0}, row_offsets(request) + step) : std::pair(request, step);
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
