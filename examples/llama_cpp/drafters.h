// What proposes drafts: what followed the last tokens before, or a smaller model.
#pragma once

#include <cstring>

#include "model.h"
#include "verifier.h"

// What drafts. After `propose`, logits: what the drafts were drawn from, [drafts, vocab], or nullptr: they were chosen.
struct Drafter {
    virtual ~Drafter() = default;
    virtual void start(const Tokens& prompt) = 0;
    virtual Tokens propose(const Tokens& text, int64_t most) = 0;
    const float* logits = nullptr;
    int64_t vocab = 0;
};

// No drafts: plain decoding.
struct NoDrafter : Drafter {
    void start(const Tokens&) override {}
    Tokens propose(const Tokens&, int64_t) override { return {}; }
};

// What followed the last tokens of the text when they occurred before.
class LookupDrafter : public Drafter {
  public:
    ~LookupDrafter() override { specens_ngram_index_destroy(index_); }
    void start(const Tokens& prompt) override {
        specens_ngram_index_destroy(index_);
        index_ = nullptr;
        check(specens_ngram_index_create(longest_match, &index_));
        known_ = 0;
        learn(prompt);
    }
    Tokens propose(const Tokens& text, int64_t most) override {
        std::vector<int64_t> tokens(static_cast<size_t>(most));
        int64_t count = 0;
        learn(text);
        if (most > 0) {
            check(specens_ngram_index_propose(index_, most, shortest_match, 0, tokens.data(), &count, nullptr));
        }
        return Tokens(tokens.begin(), tokens.begin() + count);
    }

  private:
    static constexpr int64_t shortest_match = 2, longest_match = 16;

    void learn(const Tokens& text) {
        const int64_t count[] = {static_cast<int64_t>(text.size() - known_)};
        const specens_tensor more = {const_cast<llama_token*>(text.data() + known_), SPECENS_INT32, 1, count, nullptr};
        check(specens_ngram_index_extend(index_, &more));
        known_ = text.size();
    }

    specens_ngram_index* index_ = nullptr;
    size_t known_ = 0;
};

// A smaller model, which draws its drafts as the target would.
class ModelDrafter : public Drafter {
  public:
    ModelDrafter(Model& model, Verifier& verifier, int64_t draft_len) : model_(model), verifier_(verifier) {
        vocab = model.vocab_size();
        if (verifier.needs_draft_logits()) {
            rows_.resize(static_cast<size_t>(draft_len * vocab));
            logits = rows_.data();
        }
    }
    void start(const Tokens& prompt) override { model_.roll_back(prompt.size() - 1); }
    Tokens propose(const Tokens& text, int64_t most) override {
        Tokens line = text;
        model_.roll_back(text.size() - 1);  // what it has seen of the text before is the same, and stays
        for (int64_t step = 0; step < most; ++step) {
            const float* row = model_.forward(line, 1);
            if (!rows_.empty()) {  // llama.cpp's own is overwritten by the next forward
                std::memcpy(&rows_[static_cast<size_t>(step * vocab)], row, sizeof(float) * static_cast<size_t>(vocab));
            }
            line.push_back(verifier_.draw(row, vocab, text.size(), step));
        }
        return Tokens(line.begin() + static_cast<std::ptrdiff_t>(text.size()), line.end());
    }

  private:
    Model& model_;
    Verifier& verifier_;
    std::vector<float> rows_;
};
