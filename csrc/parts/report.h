// What is told of the emitted tokens: log-probabilities and the most likely tokens.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "parts/target_arguments.h"

namespace specens {

constexpr int64_t most_top_logprobs = int64_t{1} << 20;

struct ReportArguments {
    enum class Kind : int64_t { none = 0, target = 1, raw = 2 };
    Kind kind;
    int64_t top;  // most likely tokens

    ReportArguments(int32_t logprobs, int64_t top_logprobs) : kind(static_cast<Kind>(logprobs)), top(top_logprobs) {
        if (logprobs < SPECENS_NO_LOGPROBS || logprobs > SPECENS_RAW_LOGPROBS) {
            fail("logprobs", "SPECENS_NO_LOGPROBS, SPECENS_TARGET_LOGPROBS or SPECENS_RAW_LOGPROBS",
                 std::to_string(logprobs));
        }
        if (top < 0 || top > most_top_logprobs || (top > 0 && kind == Kind::none)) {
            fail("top_logprobs", "0 to " + std::to_string(most_top_logprobs) + ", above 0 with logprobs",
                 std::to_string(top));
        }
    }
    // Throws where a buffer for what is asked for is missing.
    void check_buffers(int64_t batch, const float* logprobs, const int64_t* top_tokens,
                       const float* top_logprobs) const {
        if (batch == 0) {
            return;
        }
        require(kind == Kind::none || logprobs != nullptr, "logprobs: expected a buffer, got none");
        require(top == 0 || (top_tokens != nullptr && top_logprobs != nullptr),
                "top_tokens, top_logprobs: expected buffers, got none");
    }
    // Whether the log-probability under the target is all, so that it can be taken while its row is at hand.
    bool only_chosen() const { return kind == Kind::target && top == 0; }
    bool reads_again() const { return kind != Kind::none && !only_chosen(); }
};

// Where the report of one emitted token goes, or of several that follow each other; nullptr where it is not asked for.
struct ReportBuffers {
    float* logprob;
    int64_t* top_tokens;  // [top], most likely first, -1 where fewer have mass
    float* top_logprobs;  // [top]

    // Those of the tokens from one on.
    ReportBuffers after(int64_t tokens, int64_t top) const {
        return {logprob != nullptr ? logprob + tokens : nullptr,
                top_tokens != nullptr ? top_tokens + tokens * top : nullptr,
                top_logprobs != nullptr ? top_logprobs + tokens * top : nullptr};
    }
    // Writes what stands where no token was emitted.
    void pad(int64_t tokens, int64_t top) const {
        if (logprob != nullptr) {
            std::fill_n(logprob, tokens, 0.0f);
        }
        if (top_tokens != nullptr) {
            std::fill_n(top_tokens, tokens * top, int64_t{-1});
            std::fill_n(top_logprobs, tokens * top, -std::numeric_limits<float>::infinity());
        }
    }
};

class Reporter {
  public:
    void reserve(const Sizes& most) {
        row_.reserve(most);
        reserve_all(most.members, logits_);
        reserve_all(most.top, best_);
    }
    // The report of a token emitted at a row. `edits` have entered the row.
    void write(const TargetArguments& target, const ReportArguments& report, int64_t request, int64_t step,
               const RowEdits* edits, int64_t token, const ReportBuffers& buffers) {
        EnsembleParameters parameters = target.parameters(request);
        if (report.kind == ReportArguments::Kind::raw) {
            parameters.temperature = 1;
            parameters.filter = {};
            edits = nullptr;
        }
        target.rows(request, step, edits, logits_);
        row_.read(logits_, parameters, true);
        *buffers.logprob = static_cast<float>(row_.logprob(token));
        most_likely(report.top);
        for (int64_t rank = 0; rank < report.top; ++rank) {
            const bool there = rank < static_cast<int64_t>(best_.size());
            buffers.top_tokens[rank] = there ? best_[rank].second : -1;
            buffers.top_logprobs[rank] = there ? best_[rank].first : -std::numeric_limits<float>::infinity();
        }
    }
    // Of another token of the row that was written last.
    double logprob(int64_t token) const { return row_.logprob(token); }

  private:
    static bool better(const std::pair<float, int64_t>& a, const std::pair<float, int64_t>& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    }
    // best_: log-probability and token, best first. A heap with the worst on top holds the best so far.
    void most_likely(int64_t count) {
        best_.clear();
        alignas(64) float logprobs[tile_size];
        for (int64_t tile = 0; count > 0 && tile < row_.tiles(); ++tile) {
            row_.write_logprobs(tile, logprobs);
            const int64_t width = std::min(tile_size, row_.vocab() - tile * tile_size);
            for (int64_t index = 0; index < width; ++index) {
                if (static_cast<int64_t>(best_.size()) == count) {
                    if (!(logprobs[index] > best_.front().first)) {
                        continue;
                    }
                    std::pop_heap(best_.begin(), best_.end(), better);
                    best_.pop_back();
                }
                if (logprobs[index] > -std::numeric_limits<float>::infinity()) {
                    best_.emplace_back(logprobs[index], tile * tile_size + index);
                    std::push_heap(best_.begin(), best_.end(), better);
                }
            }
        }
        std::sort_heap(best_.begin(), best_.end(), better);
    }

    TargetRow row_;
    std::vector<LogitRow> logits_;
    std::vector<std::pair<float, int64_t>> best_;
};

}  // namespace specens
