#include <torch/csrc/stable/library.h>

#include <numeric>
#include <tuple>

#include "parts/arguments.h"
#include "parts/parallel.h"

namespace specens {
namespace {

constexpr int64_t no_drafter = -1;
enum class RuleKind : int64_t { token = 0, block = 1, typical = 2 };
constexpr double empty_residual_mass = 0x1p-20;  // what float rounding can leave of a residual that is nothing

// Draft tokens and the distributions they were drawn from.
struct DraftArguments {
    const void* tokens;  // [batch, draft_len], int32 or int64
    bool wide;
    int64_t stride_batch, stride_step, draft_len;
    int64_t drafter;          // a member, or no_drafter
    const int64_t* drafters;  // [batch, draft_len]
    std::optional<LogitView> logits;
    const int64_t* lens;  // [batch]
    SamplingArguments sampling;
    int64_t known_tokens;  // ids below it are drafts, of target probability 0 outside the target's vocabulary

    int64_t token(int64_t request, int64_t step) const {
        const int64_t index = request * stride_batch + step * stride_step;
        return wide ? static_cast<const int64_t*>(tokens)[index] : static_cast<const int32_t*>(tokens)[index];
    }
    int64_t len(int64_t request) const { return lens != nullptr ? lens[request] : draft_len; }
};

// The distribution of one draft token: a softmax, or one-hot.
class DraftRow {
  public:
    void read(const TargetArguments& target, const TargetRow& target_row, const DraftArguments& draft, int64_t request,
              int64_t step, bool greedy) {
        token_ = draft.token(request, step);
        softmax_ = nullptr;
        status_ = status_ok;
        const double temperature = draft.sampling.temperature(request);
        const FilterParameters filter = draft.sampling.filter(request);
        const int64_t member =
            draft.drafters != nullptr ? draft.drafters[request * draft.draft_len + step] : draft.drafter;
        if (greedy || temperature == 0 || (member == no_drafter && !draft.logits)) {
            return;
        }
        if (!draft.logits && (member < 0 || member >= static_cast<int64_t>(target.members.size()))) {
            status_ = status_invalid_draft_distribution;
            return;
        }
        if (!draft.logits) {
            softmax_ = target_row.member_softmax(member, temperature, filter, status_);
        }
        if (softmax_ == nullptr) {
            source_.reset(draft.logits ? draft.logits->row(request, step) : target.members[member].row(request, step));
            own_.read(source_, temperature, filter);
            status_ = source_.status();
            softmax_ = &own_;
        }
        if (!softmax_->alive()) {
            softmax_ = nullptr;
            status_ |= status_invalid_draft_distribution;
        }
    }
    int64_t token() const { return token_; }
    int32_t status() const { return status_; }
    double probability() const { return softmax_ != nullptr ? softmax_->probability(token_) : 1.0; }
    // masses[i] -= probability(first token of the tile + i)
    void subtract_tile(int64_t tile, float* masses) const {
        if (softmax_ != nullptr) {
            softmax_->add_tile(tile, -1.0, masses);  // beyond the target's vocabulary masses are not looked at
        } else if (token_ / tile_size == tile) {
            masses[token_ % tile_size] -= 1.0f;
        }
    }

  private:
    int64_t token_ = 0;
    int32_t status_ = status_ok;
    const Softmax* softmax_ = nullptr;
    MemberSource source_;
    Softmax own_;
};

struct RuleArguments {
    RuleKind kind;
    double threshold, alpha;  // of typical acceptance
};

// What one call hands to every request.
struct ChainArguments {
    const TargetArguments& target;
    const DraftArguments& draft;
    const CoinView& coins;
    RuleArguments rule;
};

// One request of the batch; kept by a thread from call to call, so that nothing is allocated in between.
class Verifier {
  public:
    void run(const ChainArguments& chain, int64_t request, int64_t* tokens, float* logprobs) {
        chain_ = &chain;
        request_ = request;
        tokens_ = tokens;
        logprobs_ = logprobs;
        len_ = chain.draft.len(request);
        parameters_ = chain.target.parameters(request);
        greedy_ = parameters_.temperature == 0;
        num_accepted = 0;
        next_token = -1;
        status = status_ok;
        if (!valid()) {
            status = status_invalid_parameter;
        } else if (chain.rule.kind == RuleKind::block && !greedy_) {
            run_block();
        } else {
            run_in_order();
        }
    }
    int64_t num_accepted = 0;
    int64_t next_token = -1;
    int32_t status = status_ok;

  private:
    // Whether there is a draft at `step`, and it is a token.
    bool has_draft(int64_t step) const {
        const int64_t token = step < len_ ? chain_->draft.token(request_, step) : -1;
        return token >= 0 && token < chain_->draft.known_tokens;
    }
    int64_t num_rows() const { return len_ + chain_->target.steps - chain_->draft.draft_len; }
    double coin(int64_t step) const { return chain_->coins(request_, step, step, 0); }
    bool valid() const {
        const int64_t draft_len = chain_->draft.draft_len;
        bool holds =
            chain_->target.valid(request_) && chain_->draft.sampling.valid(request_) && len_ >= 0 && len_ <= draft_len;
        for (int64_t step = 0; holds && !greedy_ && step < len_; ++step) {
            holds = chain_->coins.valid(request_, step);
        }
        return holds && (greedy_ || chain_->coins.valid(request_, draft_len));
    }
    // Reads the target's row, and the draft's where it has one; returns whether it has.
    bool read(int64_t step) {
        chain_->target.rows(request_, step, logits_);
        target_.read(logits_, parameters_, logprobs_ != nullptr);
        if (has_draft(step)) {
            draft_.read(chain_->target, target_, chain_->draft, request_, step, greedy_);
            return true;
        }
        return false;
    }

    // Rules that look at one draft after the other, and at no row behind the first rejection.
    void run_in_order() {
        for (; num_accepted < num_rows(); ++num_accepted) {
            const bool tests = read(num_accepted);
            status |= target_.status() | (tests ? draft_.status() : status_ok);
            if (tests && target_.alive() && accepts()) {
                emit(draft_.token());
                continue;
            }
            finish(tests, 1);
            return;
        }
    }
    bool accepts() const {
        if (greedy_) {
            return draft_.token() == target_.most_likely();
        }
        const double target = target_probability();
        if (chain_->rule.kind == RuleKind::typical) {
            return target > std::min(chain_->rule.threshold, chain_->rule.alpha * std::exp(-target_.entropy()));
        }
        return coin(num_accepted) * draft_.probability() < target;
    }

    double target_probability() const {
        return draft_.token() < target_.vocab() ? target_.probability(draft_.token()) : 0.0;
    }

    // Block verification: the last prefix whose coin is below the chance that it is kept as a whole.
    void run_block() {
        int64_t accepted = 0;
        double share = 1;
        double accepted_share = 1;
        int64_t length = 0;
        row_status_.assign(len_ + 1, status_ok);
        row_logprobs_.assign(len_ + 1, 0.0f);
        for (; share > 0 && has_draft(length); ++length) {
            read(length);
            row_status_[length] = target_.status() | draft_.status();
            if (length > 0 && coin(length - 1) < kept_chance(share)) {
                accepted = length;
                accepted_share = share;
            }
            const double target = target_probability();
            share = target > 0 ? std::min(1.0, share * target / draft_.probability()) : 0.0;
            row_logprobs_[length] =
                logprobs_ != nullptr && target > 0 ? static_cast<float>(target_.logprob(draft_.token())) : 0.0f;
        }
        if (length > 0 && !has_draft(length) && coin(length - 1) < share) {
            accepted = length;
        }
        for (; num_accepted < accepted; ++num_accepted) {
            status |= row_status_[num_accepted];
            emit_with(chain_->draft.token(request_, num_accepted), row_logprobs_[num_accepted]);
        }
        if (num_accepted < num_rows()) {
            const bool rejected = read(num_accepted);
            status |= target_.status() | (rejected ? draft_.status() : status_ok);
            finish(rejected, accepted_share);
        }
    }
    // That a prefix with this share is kept, given the rows of the draft behind it.
    double kept_chance(double share) {
        const double mass = target_.alive() ? residual_mass(share) : 0.0;
        const double rest = mass + 1 - share;
        return rest > empty_residual_mass ? mass / rest : 1.0;  // else target and draft agree to rounding
    }

    // The next token, from the rows that were read last.
    void finish(bool rejected, double share) {
        if (!rejected && num_accepted < len_) {
            status |= status_invalid_draft_token;
        }
        if (target_.alive()) {
            const bool subtracts = rejected && chain_->rule.kind != RuleKind::typical;
            next_token = next(subtracts, share, chain_->coins(request_, chain_->draft.draft_len, num_accepted, 1));
            emit(next_token);
        }
    }
    void emit(int64_t token) const {
        emit_with(token, logprobs_ != nullptr && token >= 0 ? static_cast<float>(target_.logprob(token)) : 0.0f);
    }
    void emit_with(int64_t token, float logprob) const {
        tokens_[num_accepted] = token;
        if (logprobs_ != nullptr) {
            logprobs_[num_accepted] = logprob;
        }
    }
    int64_t next(bool subtracts, double share, double coin) {
        if (greedy_) {
            return target_.most_likely();
        }
        if (subtracts) {
            if (residual_mass(share) > empty_residual_mass) {
                return specens::draw(tile_masses_, target_.vocab(), coin,
                                     [&](int64_t tile, float* masses) { residual_tile(tile, share, masses); });
            }
            status |= status_empty_residual;
        }
        return draw_from(target_, coin, tile_masses_);
    }
    // masses = max(share * target - draft, 0); returns their sum
    double residual_tile(int64_t tile, double share, float* masses) const {
        target_.write_tile(tile, masses, share);
        draft_.subtract_tile(tile, masses);
        return row_kernels().clamp_sum(masses, std::min(tile_size, target_.vocab() - tile * tile_size));
    }
    double residual_mass(double share) {
        tile_masses_.resize(target_.tiles());
        for_tiles(target_.tiles(), target_.splittable(), [&](int64_t begin, int64_t end) {
            alignas(64) float masses[tile_size];
            for (int64_t tile = begin; tile < end; ++tile) {
                tile_masses_[tile] = residual_tile(tile, share, masses);
            }
        });
        return std::accumulate(tile_masses_.begin(), tile_masses_.end(), 0.0);
    }

    const ChainArguments* chain_ = nullptr;
    int64_t request_ = 0;
    int64_t len_ = 0;
    int64_t* tokens_ = nullptr;
    float* logprobs_ = nullptr;
    EnsembleParameters parameters_{};
    bool greedy_ = false;
    TargetRow target_;
    DraftRow draft_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_;
    std::vector<int32_t> row_status_;
    std::vector<float> row_logprobs_;
};

DraftArguments draft_arguments(const TargetArguments& target, const Tensor& draft_tokens, int64_t drafter,
                               const std::optional<Tensor>& drafters, const std::optional<Tensor>& draft_logits,
                               const std::optional<Tensor>& draft_lens, const SamplingArguments& sampling) {
    const bool wide = draft_tokens.scalar_type() == ScalarType::Long;
    require(draft_tokens.dim() == 2 && (wide || draft_tokens.scalar_type() == ScalarType::Int),
            "draft_tokens must be int64 or int32 [batch, draft_len]");
    DraftArguments draft{draft_tokens.const_data_ptr(),
                         wide,
                         draft_tokens.stride(0),
                         draft_tokens.stride(1),
                         draft_tokens.size(1),
                         drafter,
                         optional_int64(drafters),
                         std::nullopt,
                         optional_int64(draft_lens),
                         sampling,
                         target.vocab};
    if (draft_logits) {
        draft.logits.emplace(*draft_logits);
        draft.known_tokens = std::max(draft.known_tokens, draft.logits->vocab);
    }
    return draft;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> verify_chain_cpu(
    const std::vector<Tensor>& member_logits, int64_t ensemble, const std::vector<double>& weights,
    const std::optional<Tensor>& weight_rows, double plausibility, bool filter_members, double temperature,
    const std::optional<Tensor>& temperatures, int64_t top_k, const std::optional<Tensor>& top_ks, double top_p,
    const std::optional<Tensor>& top_ps, double min_p, const std::optional<Tensor>& min_ps, bool min_p_first,
    const Tensor& draft_tokens, int64_t drafter, const std::optional<Tensor>& drafters,
    const std::optional<Tensor>& draft_logits, const std::optional<Tensor>& draft_lens, double draft_temperature,
    const std::optional<Tensor>& draft_temperatures, int64_t draft_top_k, const std::optional<Tensor>& draft_top_ks,
    double draft_top_p, const std::optional<Tensor>& draft_top_ps, double draft_min_p,
    const std::optional<Tensor>& draft_min_ps, bool draft_min_p_first, const std::optional<Tensor>& uniforms,
    const std::optional<Tensor>& seeds, const std::optional<Tensor>& positions, int64_t rule, double typical_threshold,
    double typical_alpha, bool logprobs) {
    const SamplingArguments sampling(temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps,
                                     min_p_first);
    const TargetArguments target(member_logits, ensemble, weights, weight_rows, plausibility, filter_members, sampling);
    const SamplingArguments draft_sampling(draft_temperature, draft_temperatures, draft_top_k, draft_top_ks,
                                           draft_top_p, draft_top_ps, draft_min_p, draft_min_ps, draft_min_p_first);
    const DraftArguments draft =
        draft_arguments(target, draft_tokens, drafter, drafters, draft_logits, draft_lens, draft_sampling);
    const int64_t width = draft.draft_len + 1;
    const CoinView coins(uniforms, seeds, positions, width);
    const ChainArguments chain{target, draft, coins, {static_cast<RuleKind>(rule), typical_threshold, typical_alpha}};
    const Tensor tokens = new_tensor({target.batch, width}, ScalarType::Long);
    const Tensor num_accepted = new_tensor({target.batch}, ScalarType::Long);
    const Tensor num_tokens = new_tensor({target.batch}, ScalarType::Long);
    const Tensor next_token = new_tensor({target.batch}, ScalarType::Long);
    const Tensor status = new_tensor({target.batch}, ScalarType::Int);
    const Tensor token_logprobs =
        logprobs ? new_tensor({target.batch, width}, ScalarType::Float) : new_tensor({0}, ScalarType::Float);
    auto* tokens_out = tokens.mutable_data_ptr<int64_t>();
    auto* accepted_out = num_accepted.mutable_data_ptr<int64_t>();
    auto* count_out = num_tokens.mutable_data_ptr<int64_t>();
    auto* next_out = next_token.mutable_data_ptr<int64_t>();
    auto* status_out = status.mutable_data_ptr<int32_t>();
    float* logprobs_out = logprobs ? token_logprobs.mutable_data_ptr<float>() : nullptr;

    for_requests(target.batch, target.vocab, [&](int64_t begin, int64_t end) {
        static thread_local Verifier verifier;
        for (int64_t request = begin; request < end; ++request) {
            int64_t* own_tokens = tokens_out + request * width;
            float* own_logprobs = logprobs_out != nullptr ? logprobs_out + request * width : nullptr;
            std::fill(own_tokens, own_tokens + width, int64_t{-1});
            if (own_logprobs != nullptr) {
                std::fill(own_logprobs, own_logprobs + width, 0.0f);
            }
            verifier.run(chain, request, own_tokens, own_logprobs);
            accepted_out[request] = verifier.num_accepted;
            next_out[request] = verifier.next_token;
            count_out[request] = verifier.num_accepted + (verifier.next_token >= 0 ? 1 : 0);
            status_out[request] = verifier.status;
        }
    });
    return {tokens, num_accepted, num_tokens, next_token, token_logprobs, status};
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_chain_cpp", TORCH_BOX(&specens::verify_chain_cpu));
}
