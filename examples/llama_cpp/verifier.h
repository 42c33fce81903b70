// What draws and verifies for one text, by libspecens.
#pragma once

#include <specens.h>

#include <string>
#include <vector>

#include "model.h"
#include "options.h"

inline void check(int32_t code) {
    if (code != SPECENS_OK) {
        throw Error(std::string("libspecens: ") + specens_last_error());
    }
}

class Verifier {
  public:
    Verifier(const Options& options, int64_t vocab) : vocab_(vocab), rule_(specens_rule_init()) {
        check(specens_workspace_create(nullptr, &workspace_));
        sampling_.temperature = options.temperature;
        sampling_.top_k = options.top_k;
        sampling_.top_p = options.top_p;
        sampling_.min_p = options.min_p;
        random_.seeds = &seeds_;
        random_.positions = &positions_;
        rule_.kind = options.rule;
        target_.num_members = 1;
        target_.sampling = &sampling_;
    }
    ~Verifier() { specens_workspace_destroy(workspace_); }
    Verifier(const Verifier&) = delete;
    Verifier& operator=(const Verifier&) = delete;

    void start(int64_t seed) { seed_ = seed; }
    // Whether verification needs the logits that drafts were drawn from.
    bool needs_draft_logits() const { return sampling_.temperature > 0 && rule_.kind != SPECENS_RULE_GUMBEL; }

    // The draft of this step of a round after `length` tokens, drawn from a row of logits.
    llama_token draw(const float* logits, int64_t vocab, size_t length, int64_t step) {
        const int64_t sizes[] = {1, vocab};
        const specens_tensor row = {const_cast<float*>(logits), SPECENS_FLOAT32, 2, sizes, nullptr};
        specens_draw draw = specens_draw_init();
        specens_drawn drawn = specens_drawn_init();
        int64_t token;
        int32_t status;
        position_ = static_cast<int64_t>(length);
        target_.member_logits = &row;
        draw.target = &target_;
        draw.random = &random_;
        draw.step = step;
        draw.gumbel_count = rule_.kind == SPECENS_RULE_GUMBEL ? 1 : 0;
        drawn.tokens = &token;
        drawn.status = &status;
        check(specens_sample(&draw, &drawn, workspace_));
        require_ok(status);
        return static_cast<llama_token>(token);
    }

    // Verifies drafts after `length` tokens by logits [drafts + 1, vocab]; appends what is emitted to the text, and
    // returns how many drafts were accepted. draft_logits: [drafts, draft_vocab], or nullptr: they were chosen.
    int64_t verify(const float* logits, const Tokens& drafts, const float* draft_logits, int64_t draft_vocab,
                   size_t length, Tokens& text) {
        const auto count = static_cast<int64_t>(drafts.size());
        const int64_t row_sizes[] = {1, count + 1, vocab_}, draft_sizes[] = {1, count};
        const int64_t draft_row_sizes[] = {1, count, draft_vocab};
        const specens_tensor rows = {const_cast<float*>(logits), SPECENS_FLOAT32, 3, row_sizes, nullptr};
        const specens_tensor draft_rows = {const_cast<float*>(draft_logits), SPECENS_FLOAT32, 3, draft_row_sizes,
                                           nullptr};
        const specens_tensor tokens = {const_cast<llama_token*>(drafts.data()), SPECENS_INT32, 2, draft_sizes, nullptr};
        std::vector<int64_t> emitted(drafts.size() + 1);
        int64_t num_accepted, num_tokens, next_token;
        int32_t status;
        specens_draft draft = specens_draft_init();
        specens_chain chain = specens_chain_init();
        specens_verdict verdict = specens_verdict_init();
        position_ = static_cast<int64_t>(length);
        target_.member_logits = &rows;
        draft.tokens = &tokens;
        draft.logits = draft_logits != nullptr ? &draft_rows : nullptr;
        chain.target = &target_;
        chain.draft = &draft;
        chain.random = &random_;
        chain.rule = &rule_;
        verdict.tokens = emitted.data();
        verdict.num_accepted = &num_accepted;
        verdict.num_tokens = &num_tokens;
        verdict.next_token = &next_token;
        verdict.status = &status;
        check(specens_verify_chain(&chain, &verdict, workspace_));
        require_ok(status);
        text.insert(text.end(), emitted.begin(), emitted.begin() + num_tokens);
        return num_accepted;
    }

  private:
    static void require_ok(int32_t status) {
        if (status != 0) {
            throw Error("the logits cannot be drawn from: status " + std::to_string(status));
        }
    }

    int64_t vocab_, seed_ = 0, position_ = 0;
    specens_workspace* workspace_ = nullptr;
    const int64_t one_[1] = {1};
    specens_tensor seeds_ = {&seed_, SPECENS_INT64, 1, one_, nullptr};
    specens_tensor positions_ = {&position_, SPECENS_INT64, 1, one_, nullptr};
    specens_sampling sampling_ = specens_sampling_init();
    specens_random random_ = specens_random_init();
    specens_target target_ = specens_target_init();
    specens_rule rule_;
};
