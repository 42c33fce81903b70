// The arguments that operators share, as the structs of specens.h; `specens_kernels.arguments` says what they hold.
#pragma once

#include "operators/tensors.h"
#include "parts/rule.h"

// In schemas. What is not given is as by default, and no graph shows it.
#define SPECENS_TARGET_OPTIONS                                                                     \
    "Tensor? allowed=None, float[]? ensemble=None, float[]? sampling=None, Tensor?[]? rows=None, " \
    "float[]? processing=None, Tensor?[]? processing_rows=None"
#define SPECENS_DRAFT_OPTIONS                                                                            \
    "int drafter=-1, Tensor? drafters=None, Tensor[]? draft_logits=None, float[]? draft_sampling=None, " \
    "bool process_drafts=True"

namespace specens {

using Members = std::vector<TorchTensor>;
using OptionalTensor = std::optional<TorchTensor>;
using OptionalTensors = std::optional<std::vector<TorchTensor>>;
using Numbers = std::optional<std::vector<double>>;
using Integers = std::optional<std::vector<int64_t>>;
using Rows = std::optional<std::vector<OptionalTensor>>;  // a tensor for each parameter that requests have of their own

// Of the target: where a batch has no numbers, requests have defaults.
struct TargetOptions {
    const OptionalTensor& allowed;
    const Numbers& ensemble;      // its kind, whether members are filtered, plausibility, weights unless they are rows
    const Numbers& sampling;      // temperature, top-k, top-p, min-p, whether min-p comes first
    const Rows& rows;             // temperature, top-k, top-p, min-p, weights, and the draft's own first four
    const Numbers& processing;    // repetition, frequency and presence penalty, min_tokens
    const Rows& processing_rows;  // the same, then bias tokens and values, end, prompt and output tokens
};

class Call {
  public:
    specens_target target = specens_target_init();
    specens_draft draft = specens_draft_init();
    specens_random random = specens_random_init();
    specens_rule rule = specens_rule_init();

    Call(const Members& members, const TargetOptions& options) : views_(members.size() + most_others) {
        target.member_logits = views_.add(members);
        target.num_members = static_cast<int64_t>(members.size());
        target.allowed = view(options.allowed);
        set_ensemble(options);
        target.sampling = set_sampling(sampling_, options.sampling, options.rows, 0);
        target.processing = set_processing(options.processing, options.processing_rows);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // torch looks for a kernel by the tensors outside optional lists only.
    const Tensor* view(const TorchTensor& tensor) {
        require(tensor.is_cpu(), "expected tensors on one device, got some on another");
        return views_.add(tensor);
    }
    const Tensor* view(const OptionalTensor& tensor) { return tensor ? view(*tensor) : nullptr; }

    // draft_logits: with slots as a second one.
    void set_draft(const TorchTensor& tokens, const OptionalTensor& lens, int64_t drafter,
                   const OptionalTensor& drafters, const OptionalTensors& logits, const Numbers& sampling,
                   const Rows& rows, bool processed) {
        require(!logits || logits->size() == 1 || logits->size() == 2, "draft_logits: expected them, perhaps slots");
        draft.tokens = view(tokens);
        draft.lens = view(lens);
        draft.drafter = drafter;
        draft.drafters = view(drafters);
        draft.logits = logits ? view((*logits)[0]) : nullptr;
        draft.slots = logits && logits->size() == 2 ? view((*logits)[1]) : nullptr;
        draft.processed = processed ? 1 : 0;
        draft.sampling = sampling ? set_sampling(draft_sampling_, sampling, rows, draft_rows) : nullptr;
    }
    // Uniforms, or seeds and positions.
    void set_random(const OptionalTensors& numbers) {
        if (numbers && numbers->size() == 1) {
            random.uniforms = view((*numbers)[0]);
        } else if (numbers) {
            require(numbers->size() == 2, "random: expected uniforms, or seeds and positions");
            random.seeds = view((*numbers)[0]);
            random.positions = view((*numbers)[1]);
        }
    }
    // Its kind, and then its settings or its table.
    void set_rule(const Numbers& numbers) {
        if (!numbers) {
            return;
        }
        rule.kind = static_cast<int32_t>(at(*numbers, 0, SPECENS_RULE_TOKEN));
        if (has_table(static_cast<RuleKind>(rule.kind))) {
            rule.table = numbers->data() + 1;
            rule.table_size = static_cast<int64_t>(numbers->size()) - 1;
        } else {
            require(numbers->size() <= 3, "rule: expected a kind and at most two settings");
            rule.threshold = at(*numbers, 1, 0);
            rule.alpha = at(*numbers, 2, 0);
        }
    }
    // Which log-probabilities are told, and of how many tokens besides.
    template <typename Struct>
    static void set_report(Struct& call, const Integers& logprobs) {
        if (logprobs) {
            require(logprobs->size() == 2, "logprobs: expected a kind and a number of tokens");
            call.logprobs = static_cast<int32_t>((*logprobs)[0]);
            call.top_logprobs = (*logprobs)[1];
        }
    }

  private:
    static constexpr size_t most_others = 40;  // tensors of a call besides the members' logits
    static constexpr size_t weight_row = 4, draft_rows = 5;

    static double at(const std::vector<double>& numbers, size_t index, double otherwise) {
        return index < numbers.size() ? numbers[index] : otherwise;
    }
    const Tensor* at(const Rows& rows, size_t index) {
        return rows && index < rows->size() ? view((*rows)[index]) : nullptr;
    }
    void set_ensemble(const TargetOptions& options) {
        constexpr size_t settings = 3;
        target.weight_rows = at(options.rows, weight_row);
        if (!options.ensemble) {
            return;
        }
        const std::vector<double>& numbers = *options.ensemble;
        target.ensemble = static_cast<int32_t>(at(numbers, 0, SPECENS_SINGLE));
        target.filter_members = at(numbers, 1, 0) != 0 ? 1 : 0;
        target.plausibility = at(numbers, 2, 0);
        const bool listed = target.ensemble != SPECENS_SINGLE && target.weight_rows == nullptr;
        require(numbers.size() == settings + (listed ? static_cast<size_t>(target.num_members) : 0),
                "ensemble: expected three numbers, and a weight for each member");
        target.weights = numbers.data() + settings;
    }
    const specens_sampling* set_sampling(specens_sampling& own, const Numbers& numbers, const Rows& rows,
                                         size_t first) {
        if (!numbers) {
            return nullptr;
        }
        require(numbers->size() == 5, "sampling: expected five numbers");
        own.temperature = (*numbers)[0];
        own.top_k = static_cast<int64_t>((*numbers)[1]);
        own.top_p = (*numbers)[2];
        own.min_p = (*numbers)[3];
        own.min_p_first = (*numbers)[4] != 0 ? 1 : 0;
        own.temperatures = at(rows, first);
        own.top_ks = at(rows, first + 1);
        own.top_ps = at(rows, first + 2);
        own.min_ps = at(rows, first + 3);
        return &own;
    }
    const specens_processing* set_processing(const Numbers& numbers, const Rows& rows) {
        if (!numbers) {
            return nullptr;
        }
        require(numbers->size() == 4, "processing: expected four numbers");
        processing_.repetition_penalty = (*numbers)[0];
        processing_.frequency_penalty = (*numbers)[1];
        processing_.presence_penalty = (*numbers)[2];
        processing_.min_tokens = static_cast<int64_t>((*numbers)[3]);
        const Tensor** const fields[] = {
            &processing_.repetition_penalties, &processing_.frequency_penalties, &processing_.presence_penalties,
            &processing_.min_tokens_rows,      &processing_.bias_tokens,         &processing_.bias_values,
            &processing_.end_tokens,           &processing_.prompt_tokens,       &processing_.output_tokens};
        for (size_t index = 0; index < std::size(fields); ++index) {
            *fields[index] = at(rows, index);
        }
        return &processing_;
    }

    Views views_;
    specens_sampling sampling_ = specens_sampling_init(), draft_sampling_ = specens_sampling_init();
    specens_processing processing_ = specens_processing_init();
};

}  // namespace specens
