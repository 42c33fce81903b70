// A model of llama.cpp with the cache of one text.
#pragma once

#include <llama.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using Tokens = std::vector<llama_token>;

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Model {
  public:
    explicit Model(const std::string& path)
        : path_(path),
          model_(llama_model_load_from_file(path.c_str(), llama_model_default_params()), llama_model_free) {
        if (model_ == nullptr) {
            throw Error("cannot load the model " + path);
        }
        if (llama_model_is_recurrent(model_.get()) || llama_model_is_hybrid(model_.get())) {
            throw Error(path + ": expected a model that can take back tokens, got a recurrent one");
        }
    }
    // Makes the cache, for a text of so many tokens; the logits of most_rows are asked for at once. threads: 0: any.
    void open(size_t size, int64_t most_rows, int64_t threads) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<uint32_t>(size);
        params.n_batch = std::max(params.n_batch, static_cast<uint32_t>(most_rows));
        params.swa_full = true;
        if (threads > 0) {
            params.n_threads = params.n_threads_batch = static_cast<int32_t>(threads);
        }
        context_.reset(llama_init_from_model(model_.get(), params));
        if (context_ == nullptr) {
            throw Error("cannot make a context of " + std::to_string(size) + " tokens for " + path_);
        }
        most_at_once_ = llama_n_batch(context_.get());
        batch_ = llama_batch_init(static_cast<int32_t>(most_at_once_), 0, 1);
    }
    ~Model() { llama_batch_free(batch_); }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
    int64_t vocab_size() const { return llama_vocab_n_tokens(vocab()); }

    // Computes what it has not seen of a text. The logits [rows, vocab] after the last `rows` tokens, which it must
    // not have seen; they lie in llama.cpp's memory until the next call.
    float* forward(const Tokens& text, size_t rows) {
        while (seen_ < text.size()) {
            const size_t rest = text.size() - seen_;
            // the rows that are asked for come in one batch
            const size_t count = rest <= most_at_once_ ? rest : std::min(most_at_once_, rest - rows);
            batch_.n_tokens = 0;
            for (size_t place = seen_; place < seen_ + count; ++place) {
                const int32_t index = batch_.n_tokens++;
                batch_.token[index] = text[place];
                batch_.pos[index] = static_cast<llama_pos>(place);
                batch_.n_seq_id[index] = 1;
                batch_.seq_id[index][0] = 0;
                batch_.logits[index] = place + rows >= text.size();
            }
            if (llama_decode(context_.get(), batch_) != 0) {
                throw Error("llama_decode failed");
            }
            seen_ += count;
        }
        return rows > 0 ? llama_get_logits_ith(context_.get(), batch_.n_tokens - static_cast<int32_t>(rows)) : nullptr;
    }
    // Forgets what comes after so many tokens.
    void roll_back(size_t length) {
        if (seen_ > length) {
            if (!llama_memory_seq_rm(llama_get_memory(context_.get()), 0, static_cast<llama_pos>(length), -1)) {
                throw Error("this model's cache cannot take back what was rejected");
            }
            seen_ = length;
        }
    }

  private:
    std::string path_;
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model_;
    std::unique_ptr<llama_context, decltype(&llama_free)> context_{nullptr, llama_free};
    llama_batch batch_{};
    size_t most_at_once_ = 0, seen_ = 0;
};
