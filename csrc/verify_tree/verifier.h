// Verification of one request's tree: the accepted path and the next token.
#pragma once

#include <vector>

#include "sample/best_scores.h"
#include "verify_tree/arguments.h"
#include "verify_tree/child_draft.h"
#include "verify_tree/k_seq.h"
#include "verify_tree/remainder.h"

namespace specens {

// One request of the batch; kept by a thread from call to call, so that nothing is allocated in between.
class TreeVerifier {
  public:
    void reserve(const Sizes& most) {
        edits_.reserve(most);
        links_.reserve(most);
        target_.reserve(most);
        scores_.reserve(most);
        child_.reserve(most);
        left_.reserve(most);
        ratio_.reserve(most);
        reporter_.reserve(most);
        reserve_all(most.members, logits_);
        reserve_all(most.nodes + 1, before_, next_child_, run_, reached_, row_status_, node_status_, share_, kept_);
    }
    void run(const TreeCall& call, int64_t request, const TreeOutput& output) {
        call_ = &call;
        request_ = request;
        num_accepted = 0;
        next_token = -1;
        status = status_ok;
        parameters_ = call.target.parameters(request);
        greedy_ = parameters_.temperature == 0;
        if (!valid()) {
            status = status_invalid_parameter;
            return;
        }
        start();
        if (greedy_ || call.rule.kind == RuleKind::typical || by_scores()) {
            find_longest();
        } else if (call.rule.kind == RuleKind::traversal) {
            traverse();
        } else {
            descend();
        }
        finish(output);
        if (call.report.kind != ReportArguments::Kind::none) {
            report(output);
        }
    }
    int64_t num_accepted = 0;
    int64_t next_token = -1;
    int32_t status = status_ok;

  private:
    bool valid() const {
        if (!call_->target.valid(request_) || !call_->draft.valid(request_)) {
            return false;
        }
        const int64_t num_nodes = call_->draft.len(request_);
        for (int64_t node = 0; !greedy_ && !by_scores() && node < num_nodes; ++node) {
            if (!call_->random.valid(request_, node)) {
                return false;
            }
        }
        return greedy_ || by_scores() || call_->random.valid(request_, call_->tree.nodes());
    }
    bool by_scores() const { return call_->rule.by_scores(); }
    void start() {
        const int64_t nodes = call_->tree.nodes();
        links_.build(call_->tree, request_, call_->draft.len(request_));
        row_status_.assign(nodes + 1, status_ok);
        node_status_.assign(nodes, status_ok);
        at_row_ = -1;
        last_ = 0;
        edited_ = call_->target.edited();
        if (edited_) {
            const int64_t vocab = std::max(call_->target.vocab, call_->draft.known_tokens);
            edits_.start(call_->target.processing.of(request_, vocab), request_);
        }
    }
    int64_t token(int64_t node) const { return call_->draft.token(request_, node); }
    double uniform(int64_t node) const { return call_->random(request_, node, node, 0); }
    const RowEdits* edits_at(int64_t row) {
        if (!edited_) {
            return nullptr;
        }
        before_.clear();
        for (int64_t above = row; above > 0; above = links_.parent_row(above - 1)) {
            before_.push_back(token(above - 1));
        }
        edits_.enter_row(before_.data(), links_.depth(row), links_.depth(row), call_->target.mask(request_, row));
        return &edits_;
    }
    void read(int64_t row) {
        row_edits_ = edits_at(row);
        call_->target.rows(request_, row, row_edits_, logits_);
        at_row_ = row;
        if (by_scores()) {
            picked_ = scores_.find_best(logits_, parameters_, call_->random.noise_key(request_, links_.depth(row)));
            row_status_[row] = scores_.status();
            alive_ = picked_ >= 0;
            return;
        }
        target_.read(logits_, parameters_, false);
        row_status_[row] = target_.status();
        alive_ = target_.alive();
        picked_ = greedy_ && alive_ ? target_.most_likely() : -1;
    }
    // Whether a node's draft is a token; the status says if not.
    bool has_token(int64_t node) {
        const bool known = token(node) >= 0 && token(node) < call_->draft.known_tokens;
        node_status_[node] = known ? status_ok : status_invalid_draft_token;
        return known;
    }

    // The longest path all of whose nodes pass; a row is read only if all nodes on the way to it do.
    void find_longest() {
        reached_.assign(links_.rows(), 0);
        reached_[0] = 1;
        for (int64_t row = 0; row < links_.rows(); ++row) {
            if (reached_[row] == 0 || links_.first_child(row) < 0) {
                continue;
            }
            read(row);
            const double limit = alive_ && picked_ < 0 ? call_->rule.typical_limit(target_) : 0.0;
            for (int64_t node = links_.first_child(row); node >= 0; node = links_.next_sibling(node)) {
                if (has_token(node) && alive_ && passes(token(node), limit)) {
                    reached_[node + 1] = 1;
                    const int64_t deeper = links_.depth(node + 1) - links_.depth(last_);
                    last_ = deeper > 0 || (deeper == 0 && node + 1 < last_) ? node + 1 : last_;
                }
            }
        }
        if (at_row_ != last_) {
            read(last_);
        }
        left_.start(target_, 1);
    }
    bool passes(int64_t token, double limit) const {
        if (picked_ >= 0) {
            return token == picked_;
        }
        return token < target_.vocab() && target_.probability(token) > limit;
    }

    void enter(int64_t row, double share) {
        read(row);
        left_.start(target_, share);
        child_.enter_row();
    }
    // Offers a child to the row. Returns its probability there, given that the text gets to the row.
    double offer(int64_t node) {
        child_.read(call_->target, target_, call_->draft, request_, node, at_row_, row_edits_,
                    call_->tree.without_replacement);
        node_status_[node] |= child_.status();
        return left_.share() * left_.probability(child_.token());
    }
    void reject(int64_t node) { node_status_[node] |= left_.subtract(child_) ? status_empty_residual : status_ok; }

    // From the root down, run of children after run; no row is looked at that the text does not get to.
    void descend() {
        enter(0, 1);
        int64_t node = links_.first_child(0);
        while (node >= 0) {
            if (!has_token(node)) {
                node = links_.next_sibling(node);
                continue;
            }
            const int64_t accepted = test_run(node);
            if (accepted >= 0) {
                last_ = accepted + 1;
                enter(last_, 1);
                node = links_.first_child(last_);
            } else {
                reject(run_.back());
                node = links_.next_sibling(run_.back());
            }
        }
    }
    // Tests children from this one on that are tested alike. Returns the one that is accepted, else -1.
    int64_t test_run(int64_t first) {
        double target = offer(first);
        find_run(first);
        const auto count = static_cast<int64_t>(run_.size());
        bool known = count == 1 || !alive_;
        double ratio = 1;  // from 1 to the number of the run: not looked for where both say the same
        for (const int64_t node : run_) {
            target = node == first ? target : offer(node);
            const double draft = uniform(node) * child_.probability();
            if (draft >= target) {
                continue;
            }
            if (!known && draft * static_cast<double>(count) >= target) {
                ratio = ratio_.find(left_, child_, count);
                known = true;
            }
            if (draft * ratio < target) {
                return node;
            }
        }
        child_.multiply(known ? ratio : ratio_.find(left_, child_, count));
        return -1;
    }
    // This child and, by the rule k_seq, those after it that its drafter drew from the same distribution.
    void find_run(int64_t first) {
        run_.assign(1, first);
        if (call_->rule.kind != RuleKind::k_seq || !child_.drawn()) {
            return;
        }
        const int64_t drafter = call_->draft.drafter_of(request_, first);
        for (int64_t node = links_.next_sibling(first); node >= 0; node = links_.next_sibling(node)) {
            if (has_token(node)) {
                if (call_->draft.drafter_of(request_, node) != drafter) {
                    return;
                }
                run_.push_back(node);
            }
        }
    }

    // From the leaves to the root: the first row, children before parents, whose uniform is below its share.
    void traverse() {
        share_.assign(links_.rows(), 0.0);
        kept_.assign(links_.rows(), 0.0);
        next_child_.assign(links_.rows(), -1);
        share_[0] = 1;
        offer_all(0);
        while (true) {
            const int64_t node = next_child_[last_];
            if (node >= 0) {
                next_child_[last_] = links_.next_sibling(node);
                if (share_[node + 1] > 0) {
                    last_ = node + 1;
                    offer_all(last_);
                }
            } else if (last_ == 0 || uniform(last_ - 1) < kept_[last_]) {
                break;
            } else {
                last_ = links_.parent_row(last_ - 1);
            }
        }
        if (at_row_ != last_) {
            offer_all_again(last_);
        }
    }
    // The shares of a row's children, and what they leave to the row. A leaf need not be read for it.
    void offer_all(int64_t row) {
        next_child_[row] = links_.first_child(row);
        kept_[row] = share_[row];
        if (next_child_[row] >= 0) {
            offer_all_again(row);
            kept_[row] = left_.share();
        }
    }
    void offer_all_again(int64_t row) {
        enter(row, share_[row]);
        for (int64_t node = links_.first_child(row); node >= 0 && left_.share() > 0; node = links_.next_sibling(node)) {
            if (has_token(node)) {
                const double target = offer(node);
                share_[node + 1] = target > 0 ? std::min(1.0, target / child_.probability()) : 0.0;
                reject(node);
            }
        }
    }

    // The next token, from the row that was read last, and what is told of the path to it.
    void finish(const TreeOutput& output) {
        num_accepted = links_.depth(last_);
        for (int64_t row = last_; row > 0; row = links_.parent_row(row - 1)) {
            output.path[links_.depth(row) - 1] = row - 1;
            output.tokens[links_.depth(row) - 1] = token(row - 1);
        }
        if (alive_) {
            const double uniform = call_->random(request_, call_->tree.nodes(), num_accepted, 1);
            next_token = picked_ >= 0 ? picked_ : left_.draw(uniform);
            output.tokens[num_accepted] = next_token;
        }
        collect_status(last_, -1);
        for (int64_t row = last_; row > 0; row = links_.parent_row(row - 1)) {
            collect_status(links_.parent_row(row - 1), row - 1);
        }
    }
    // Of a row and its children up to the accepted one.
    void collect_status(int64_t row, int64_t accepted) {
        status |= row_status_[row];
        for (int64_t node = links_.first_child(row); node >= 0; node = links_.next_sibling(node)) {
            if (node == accepted) {
                status |= node_status_[node] & ~status_empty_residual;
                break;
            }
            status |= node_status_[node];
        }
    }
    void report(const TreeOutput& output) {
        for (int64_t step = 0; step < num_accepted + (next_token >= 0 ? 1 : 0); ++step) {
            const int64_t row = step == 0 ? 0 : output.path[step - 1] + 1;
            const ReportBuffers buffers = output.report.after(step, call_->report.top);
            reporter_.write(call_->target, call_->report, request_, row, edits_at(row), output.tokens[step], buffers);
        }
    }

    const TreeCall* call_ = nullptr;
    int64_t request_ = 0;
    int64_t last_ = 0;     // the accepted row
    int64_t at_row_ = -1;  // that was read last
    EnsembleParameters parameters_{};
    bool greedy_ = false;
    bool edited_ = false;
    bool alive_ = false;   // the row that was read last has a token
    int64_t picked_ = -1;  // the one token that may follow there: the most likely, or that of the best score
    const RowEdits* row_edits_ = nullptr;
    RowEdits edits_;
    TreeLinks links_;
    TargetRow target_;
    BestScores scores_;
    ChildDraft child_;
    Remainder left_;
    SequentialRatio ratio_;
    Reporter reporter_;
    std::vector<LogitRow> logits_;
    std::vector<int64_t> before_, next_child_;
    std::vector<int64_t> run_;  // children that are tested alike
    std::vector<char> reached_;
    std::vector<int32_t> row_status_, node_status_;
    std::vector<double> share_, kept_;  // of a row: at first, and when all children were rejected
};

}  // namespace specens
