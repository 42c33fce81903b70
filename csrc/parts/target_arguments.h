// The arguments that make the target distributions of a batch, and its random numbers.
#pragma once

#include <cmath>
#include <optional>
#include <span>
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
    RequestNumber temperature, top_p, min_p;
    IntegerRows top_ks;
    int64_t top_k;
    bool min_p_first;

    SamplingArguments(const specens_sampling* given, int64_t batch)
        : SamplingArguments(adopted("sampling", given, specens_sampling_init()), batch) {}

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

  private:
    SamplingArguments(const specens_sampling& own, int64_t batch)
        : temperature("temperature", own.temperature, own.temperatures, batch),
          top_p("top_p", own.top_p, own.top_ps, batch),
          min_p("min_p", own.min_p, own.min_ps, batch),
          top_ks("top_k", own.top_ks, batch),
          top_k(own.top_k),
          min_p_first(own.min_p_first != 0) {}
};

// Logit processing of a batch.
struct ProcessingArguments {
    bool active;  // whether any logit may be changed
    RequestNumber repetition, frequency, presence;
    IntegerTable bias_tokens;
    const float* bias_values;  // [batch, n]
    IntegerTable end_tokens, prompt_tokens, output_tokens;
    IntegerRows min_tokens_rows;
    int64_t min_tokens;

    ProcessingArguments(const specens_processing* given, int64_t batch)
        : ProcessingArguments(given != nullptr, adopted("processing", given, specens_processing_init()), batch) {}

    RequestProcessing of(int64_t request, int64_t vocab) const {
        return {bias_tokens,
                end_tokens,
                prompt_tokens,
                output_tokens,
                bias_values + request * bias_tokens.columns,
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
    ProcessingArguments(bool given, const specens_processing& own, int64_t batch)
        : active(given),
          repetition("repetition_penalty", own.repetition_penalty, own.repetition_penalties, batch),
          frequency("frequency_penalty", own.frequency_penalty, own.frequency_penalties, batch),
          presence("presence_penalty", own.presence_penalty, own.presence_penalties, batch),
          bias_tokens("bias_tokens", own.bias_tokens, {batch, any_size}),
          bias_values(optional_float("bias_values", own.bias_values, batch, bias_tokens.columns)),
          end_tokens("end_tokens", own.end_tokens, {batch, any_size}),
          prompt_tokens("prompt_tokens", own.prompt_tokens, {batch, any_size}),
          output_tokens("output_tokens", own.output_tokens, {batch, any_size}),
          min_tokens_rows("min_tokens", own.min_tokens_rows, batch),
          min_tokens(own.min_tokens) {
        require(bias_values != nullptr || bias_tokens.columns == 0 || batch == 0,
                "bias_values: expected one for each of bias_tokens, got none");
    }
};

// Random numbers: given, or from seeds and positions, or 0 where neither is (all requests are greedy).
struct RandomNumbers {
    const Tensor* uniforms;  // [batch, width], or [batch]
    IntegerRows seeds, positions;
    bool wide = true;  // float64, else float32
    int64_t stride_request = 0, stride_index = 0;

    RandomNumbers(const specens_random* given, int64_t batch, int64_t width)
        : RandomNumbers(adopted("random", given, specens_random_init()), batch, width) {}

    bool any() const { return uniforms != nullptr || seeds.given(); }
    // Of a token's noise, at so many positions after the first; none where all requests are greedy.
    std::optional<NoiseKey> noise_key(int64_t request, int64_t step) const {
        if (!seeds.given()) {
            return std::nullopt;
        }
        return NoiseKey{static_cast<uint64_t>(seeds(request)),
                        static_cast<uint64_t>(positions(request)) + static_cast<uint64_t>(step)};
    }
    // `index`: which of the given ones.
    double operator()(int64_t request, int64_t index, int64_t step, int64_t stream) const {
        if (uniforms != nullptr) {
            const int64_t at = request * stride_request + index * stride_index;
            return wide ? data_of<double>(*uniforms)[at] : double{data_of<float>(*uniforms)[at]};
        }
        return seeds.given() ? philox_uniform(seeds(request), positions(request), step, stream) : 0.0;
    }
    bool valid(int64_t request, int64_t index) const {
        const double uniform = uniforms != nullptr ? (*this)(request, index, 0, 0) : 0.0;
        return uniform >= 0 && uniform < 1;
    }

  private:
    RandomNumbers(const specens_random& own, int64_t batch, int64_t width)
        : uniforms(own.uniforms), seeds("seeds", own.seeds, batch), positions("positions", own.positions, batch) {
        if (uniforms != nullptr) {
            require_dtype("uniforms", *uniforms, {SPECENS_FLOAT64, SPECENS_FLOAT32}, "float64 or float32");
            if (width != 1 || uniforms->ndim != 1) {
                require_shape("uniforms", *uniforms, {batch, width});
                stride_index = stride(*uniforms, 1);
            } else {
                require_shape("uniforms", *uniforms, {batch});
            }
            wide = uniforms->dtype == SPECENS_FLOAT64;
            stride_request = stride(*uniforms, 0);
        }
        require(seeds.given() == positions.given() && !(seeds.given() && uniforms != nullptr),
                "seeds, positions, uniforms: expected either uniforms, or seeds and positions, got others");
    }
};

// The target distributions of a batch. The caller's memory outlives it.
class TargetArguments {
    specens_target own_;  // what follows is made from it

  public:
    std::span<const Tensor> members;
    int64_t batch, steps, vocab = 0;
    EnsembleKind kind;
    IntegerRows row_offsets;  // [batch + 1] where rows are packed
    SamplingArguments sampling;
    ProcessingArguments processing;
    const Tensor* allowed;  // [batch, steps, words], [rows, words] where they are packed

    explicit TargetArguments(const specens_target* given)
        : own_(adopted("target", given, specens_target_init())),
          members(checked_members(own_)),
          batch(own_.row_offsets != nullptr ? size(*own_.row_offsets, 0) - 1 : size(members[0], 0)),
          kind(static_cast<EnsembleKind>(own_.ensemble)),
          row_offsets("row_offsets", own_.row_offsets, batch + 1),
          sampling(own_.sampling, batch),
          processing(own_.processing, batch),
          allowed(own_.allowed),
          weight_rows_(optional_float("weight_rows", own_.weight_rows, batch, own_.num_members)),
          weights_(own_.weight_rows == nullptr && kind != EnsembleKind::single ? own_.weights : &one) {
        for (const Tensor& logits : members) {
            vocab = std::max(vocab, size(logits, logits.ndim - 1));
        }
        steps = LogitView(members[0], packed()).steps;
        check_ensemble();
        check_allowed();
    }
    bool packed() const { return row_offsets.given(); }
    EnsembleParameters parameters(int64_t request) const {
        const float* own = weight_rows_ != nullptr ? weight_rows_ + request * members.size() : nullptr;
        return {kind,
                {own, weights_},
                own_.plausibility,
                sampling.temperature(request),
                sampling.filter(request),
                own_.filter_members != 0};
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
        const auto [outer, inner] = row_index(request, step);
        const int64_t last = allowed->ndim - 1;
        const int64_t offset = packed() || last == 1 ? (outer + inner) * stride(*allowed, 0)
                                                     : outer * stride(*allowed, 0) + inner * stride(*allowed, 1);
        return {data_of<int32_t>(*allowed) + offset, size(*allowed, last)};
    }
    LogitRow row(int64_t member, int64_t request, int64_t step, const RowEdits* edits) const {
        const auto [outer, inner] = row_index(request, step);
        LogitRow row = LogitView(members[member], packed()).row(outer, inner);
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
    static constexpr double one = 1;

    static std::span<const Tensor> checked_members(const specens_target& own) {
        require(own.member_logits != nullptr && own.num_members > 0, "member_logits: expected at least one, got none");
        if (own.row_offsets != nullptr && (own.row_offsets->ndim != 1 || size(*own.row_offsets, 0) < 1)) {
            fail("row_offsets", "shape [batch + 1]", shape_text(*own.row_offsets));
        }
        const std::span<const Tensor> members(own.member_logits, static_cast<size_t>(own.num_members));
        for (const Tensor& logits : members) {
            check_logits("member_logits", logits);
            require_same_rows("member_logits", logits, members[0]);
        }
        if (own.row_offsets != nullptr && members[0].ndim != 2) {
            fail("member_logits", "packed [rows, vocab]", shape_text(members[0]));
        }
        return members;
    }
    static void require_same_rows(const char* name, const Tensor& tensor, const Tensor& first) {
        if (tensor.ndim != first.ndim || !std::equal(first.sizes, first.sizes + first.ndim - 1, tensor.sizes)) {
            fail(name, "a row for each one of the first member's " + shape_text(first), shape_text(tensor));
        }
    }
    void check_ensemble() const {
        if (own_.ensemble < SPECENS_SINGLE || own_.ensemble > SPECENS_LOGIT_MIXTURE) {
            fail("ensemble", "SPECENS_SINGLE, SPECENS_MIXTURE or SPECENS_LOGIT_MIXTURE", std::to_string(own_.ensemble));
        }
        require(kind != EnsembleKind::single || members.size() == 1,
                "ensemble: expected one for several members, got none");
        require(weights_ != nullptr, "weights: expected one a member, got none");
    }
    void check_allowed() const {
        if (allowed != nullptr) {
            require_same_rows("allowed", *allowed, members[0]);
            if (allowed->dtype != SPECENS_INT32 || size(*allowed, allowed->ndim - 1) == 0 ||
                !has_contiguous_rows(*allowed)) {
                fail("allowed", "int32 with contiguous words", shape_text(*allowed) + " or another dtype or layout");
            }
        }
    }
    std::pair<int64_t, int64_t> row_index(int64_t request, int64_t step) const {
        return packed() ? std::pair(int64_t{0}, row_offsets(request) + step) : std::pair(request, step);
    }

    const float* weight_rows_;  // [batch, members]
    const double* weights_;     // [members]
};

// What processing changes in the rows of a chain.
class ChainEdits {
  public:
    // In the row after so many drafts, whose tokens lie in a table [batch, n]; nullptr: nothing is ever changed.
    const RowEdits* at(const TargetArguments& target, const IntegerTable& drafts, int64_t vocab, int64_t request,
                       int64_t step) {
        if (!target.edited()) {
            return nullptr;
        }
        before_.clear();
        for (int64_t index = 0; index < std::min(step, drafts.columns); ++index) {
            before_.push_back(drafts(request, index));
        }
        edits_.start(target.processing.of(request, vocab), request);
        edits_.enter_row(before_.data(), static_cast<int64_t>(before_.size()), step, target.mask(request, step));
        return &edits_;
    }

  private:
    RowEdits edits_;
    std::vector<int64_t> before_;
};

// Draws from a target row itself.
inline int64_t draw_from(const TargetRow& target, double uniform, std::vector<double>& tile_masses) {
    tile_masses.resize(target.tiles());
    for (int64_t tile = 0; tile < target.tiles(); ++tile) {
        tile_masses[tile] = target.tile_mass(tile);
    }
    return draw(tile_masses, target.vocab(), uniform,
                [&](int64_t tile, float* masses) { target.write_tile(tile, masses); });
}

}  // namespace specens
