// Speculative decoding on llama.cpp's C API, verified by libspecens. options.h says what it takes.
#include <chrono>
#include <cstdio>

#include "drafters.h"
#include "model.h"
#include "options.h"
#include "verifier.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Of all samples of a run.
struct Statistics {
    int64_t tokens = 0, rounds = 0, drafted = 0, accepted = 0;
    double drafting = 0, computing = 0, verifying = 0;  // seconds

    double seconds() const { return drafting + computing + verifying; }
    double tokens_per_second() const { return static_cast<double>(tokens) / seconds(); }
};

Tokens tokenized(const llama_vocab* vocab, const std::string& text) {
    Tokens tokens(text.size() + 2);  // none is shorter than a byte, but for those that begin and end a text
    const int32_t count = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                         static_cast<int32_t>(tokens.size()), true, true);
    if (count < 1) {
        throw Error("--prompt: expected a text of one token or more");
    }
    tokens.resize(static_cast<size_t>(count));
    return tokens;
}

std::string piece_of(const llama_vocab* vocab, llama_token token) {
    std::string piece(64, '\0');
    int32_t length = llama_token_to_piece(vocab, token, piece.data(), static_cast<int32_t>(piece.size()), 0, false);
    if (length < 0) {
        piece.resize(static_cast<size_t>(-length));
        length = llama_token_to_piece(vocab, token, piece.data(), -length, 0, false);
    }
    piece.resize(static_cast<size_t>(length));
    return piece;
}

void require_same_vocabulary(const llama_vocab* own, const llama_vocab* other) {
    const int32_t count = std::min(llama_vocab_n_tokens(own), llama_vocab_n_tokens(other));
    for (llama_token token = 0; token < count; ++token) {
        if (std::string(llama_vocab_get_text(own, token)) != llama_vocab_get_text(other, token)) {
            throw Error("--draft-model: expected the vocabulary of the model, got another: token " +
                        std::to_string(token) + " is '" + llama_vocab_get_text(other, token) + "', not '" +
                        llama_vocab_get_text(own, token) + "'");
        }
    }
}

// Takes off what came after the end of the text; whether there was one.
bool cut_at_end(const llama_vocab* vocab, size_t first, Tokens& text) {
    const auto is_end = [vocab](llama_token token) { return llama_vocab_is_eog(vocab, token); };
    const auto end = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(first), text.end(), is_end);
    const bool found = end != text.end();
    text.erase(end, text.end());
    return found;
}

// Continues the prompt, which the model has seen but for its last token, and tells `emit` what comes.
template <typename Emit>
void generate(const Options& options, const Tokens& prompt, int64_t seed, Model& model, Drafter& drafter,
              Verifier& verifier, Statistics& statistics, const Emit& emit) {
    const size_t end = prompt.size() + static_cast<size_t>(options.tokens);
    Tokens text = prompt;
    verifier.start(seed);
    drafter.start(prompt);
    model.roll_back(prompt.size() - 1);
    for (bool ended = false; !ended && text.size() < end;) {
        const size_t length = text.size();
        auto begin = Clock::now();
        const int64_t most = std::min(options.draft_len, static_cast<int64_t>(end - length) - 1);
        const Tokens drafts = drafter.propose(text, most);
        statistics.drafting += seconds_since(begin);
        begin = Clock::now();
        Tokens line = text;
        line.insert(line.end(), drafts.begin(), drafts.end());
        const float* logits = model.forward(line, drafts.size() + 1);
        statistics.computing += seconds_since(begin);
        begin = Clock::now();
        const int64_t accepted = verifier.verify(logits, drafts, drafter.logits, drafter.vocab, length, text);
        statistics.verifying += seconds_since(begin);
        model.roll_back(text.size() - 1);
        ended = cut_at_end(model.vocab(), length, text);
        emit(text, length);
        statistics.tokens += static_cast<int64_t>(text.size() - length) + (ended ? 1 : 0);
        statistics.rounds += 1;
        statistics.drafted += static_cast<int64_t>(drafts.size());
        statistics.accepted += accepted;
    }
}

// All samples.
Statistics run(const Options& options, const Tokens& prompt, Model& model, Drafter& drafter, Verifier& verifier,
               bool print) {
    Statistics statistics;
    for (int64_t sample = 0; sample < options.samples; ++sample) {
        const auto emit = [&](const Tokens& text, size_t first) {
            for (size_t place = first; print && place < text.size(); ++place) {
                const bool separate = options.ids && place > prompt.size();
                const std::string own =
                    options.ids ? std::to_string(text[place]) : piece_of(model.vocab(), text[place]);
                std::printf("%s%s", separate ? " " : "", own.c_str());
            }
            std::fflush(stdout);
        };
        generate(options, prompt, options.seed + sample, model, drafter, verifier, statistics, emit);
        if (print) {
            std::putchar('\n');
        }
    }
    return statistics;
}

void tell(const char* name, const Statistics& own) {
    std::fprintf(stderr,
                 "%s: %lld tokens in %lld rounds, %.1f tokens/s; %lld of %lld drafts accepted (%.0f %%); "
                 "drafting %.1f %%, model %.1f %%, verification %.2f %%\n",
                 name, static_cast<long long>(own.tokens), static_cast<long long>(own.rounds), own.tokens_per_second(),
                 static_cast<long long>(own.accepted), static_cast<long long>(own.drafted),
                 own.drafted > 0 ? 100.0 * static_cast<double>(own.accepted) / static_cast<double>(own.drafted) : 0,
                 100 * own.drafting / own.seconds(), 100 * own.computing / own.seconds(),
                 100 * own.verifying / own.seconds());
}

void decode(const Options& options) {
    Model model(options.model);
    const Tokens prompt = tokenized(model.vocab(), options.prompt);
    const size_t size = prompt.size() + static_cast<size_t>(options.tokens);
    model.open(size, options.draft_len + 1, options.threads);
    Verifier verifier(options, model.vocab_size());
    std::unique_ptr<Model> draft_model;
    std::unique_ptr<Drafter> drafter;
    if (options.draft_len == 0) {
        drafter = std::make_unique<NoDrafter>();
    } else if (options.draft_model.empty()) {
        drafter = std::make_unique<LookupDrafter>();
    } else {
        draft_model = std::make_unique<Model>(options.draft_model);
        require_same_vocabulary(model.vocab(), draft_model->vocab());
        draft_model->open(size, 1, options.threads);
        drafter = std::make_unique<ModelDrafter>(*draft_model, verifier, options.draft_len);
        draft_model->forward(prompt, 0);
    }
    model.forward(prompt, 0);
    const Statistics speculative = run(options, prompt, model, *drafter, verifier, true);
    tell(options.draft_len > 0 ? "speculative" : "plain", speculative);
    if (options.compare) {
        NoDrafter none;
        const Statistics plain = run(options, prompt, model, none, verifier, false);
        tell("plain", plain);
        std::fprintf(stderr, "%.2f times as fast\n", speculative.tokens_per_second() / plain.tokens_per_second());
    }
}

void log(ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

}  // namespace

int main(int count, char** arguments) {
    int result = 0;
    llama_log_set(log, nullptr);
    llama_backend_init();
    try {
        const Options options = parse(count, arguments);
        if (options.help) {
            std::fputs(usage, stdout);
        } else {
            decode(options);
        }
    } catch (const UsageError& error) {
        std::fprintf(stderr, "speculate: %s\n", error.what());
        result = 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "speculate: %s\n", error.what());
        result = 1;
    }
    llama_backend_free();
    return result;
}
