// The command line of `speculate`.
#pragma once

#include <getopt.h>
#include <specens.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>

constexpr const char* usage =
    R"(usage: speculate -m MODEL.gguf (-p PROMPT | -f FILE) [options]

Continues a prompt by speculative decoding: llama.cpp computes, libspecens verifies.

  -m, --model FILE         the model whose text is wanted
  -p, --prompt TEXT        special tokens in it are read as such
  -f, --file FILE          a file that holds the prompt
  -n, --tokens N           new tokens; fewer where the model ends the text (128)
      --draft-model FILE   a smaller model of the same vocabulary that drafts; without one, drafts are what followed
                           the last tokens when they occurred before
      --draft-len N        drafts of a round; 0: plain decoding (8, by a model 4)
      --rule RULE          token, block, or gumbel, by which the text of a seed is that of plain decoding (token)
      --temperature X      0: the most likely token (0.8)
      --top-k N            0: off (0)
      --top-p X            1: off (1)
      --min-p X            0: off (0)
      --seed N             (0)
      --samples N          continue the prompt so many times, with the seeds from --seed on (1)
      --compare            decode plainly too, and tell how much faster this was
      --ids                print token ids, a line a sample, and no text
  -t, --threads N          of llama.cpp; 0: its own choice (0)
)";

struct Options {
    std::string model, draft_model, prompt;
    int64_t tokens = 128, draft_len = -1, top_k = 0, seed = 0, samples = 1, threads = 0;
    double temperature = 0.8, top_p = 1, min_p = 0;
    int32_t rule = SPECENS_RULE_TOKEN;
    bool compare = false, ids = false, help = false;
};

// What is wrong with the command line.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The number of an option; `expected` says in words what least and most are.
template <typename Number>
Number number_of(const std::string& option, const char* text, Number least, Number most, const char* expected) {
    char* end = nullptr;
    Number value;
    errno = 0;
    if constexpr (std::is_integral_v<Number>) {
        value = std::strtoll(text, &end, 10);
    } else {
        value = std::strtod(text, &end);
    }
    if (end == text || *end != '\0' || errno != 0 || !(value >= least && value <= most)) {
        throw UsageError(option + ": expected " + expected + ", got '" + text + "'");
    }
    return value;
}

inline int32_t rule_of(const std::string& name) {
    const std::map<std::string, int32_t> rules = {
        {"token", SPECENS_RULE_TOKEN}, {"block", SPECENS_RULE_BLOCK}, {"gumbel", SPECENS_RULE_GUMBEL}};
    const auto found = rules.find(name);
    if (found == rules.end()) {
        throw UsageError("--rule: expected token, block or gumbel, got '" + name + "'");
    }
    return found->second;
}

inline std::string contents_of(const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw UsageError(std::string("--file: cannot read ") + path);
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

inline Options parse(int count, char** arguments) {
    constexpr int64_t any = std::numeric_limits<int32_t>::max();
    Options options;
    enum { draft_model = 256, draft_len, rule, temperature, top_k, top_p, min_p, seed, samples, compare, ids };
    static const option known[] = {
        {"model", required_argument, nullptr, 'm'},       {"prompt", required_argument, nullptr, 'p'},
        {"file", required_argument, nullptr, 'f'},        {"tokens", required_argument, nullptr, 'n'},
        {"threads", required_argument, nullptr, 't'},     {"help", no_argument, nullptr, 'h'},
        {"draft-model", required_argument, nullptr, draft_model},
        {"draft-len", required_argument, nullptr, draft_len},
        {"rule", required_argument, nullptr, rule},       {"temperature", required_argument, nullptr, temperature},
        {"top-k", required_argument, nullptr, top_k},     {"top-p", required_argument, nullptr, top_p},
        {"min-p", required_argument, nullptr, min_p},     {"seed", required_argument, nullptr, seed},
        {"samples", required_argument, nullptr, samples}, {"compare", no_argument, nullptr, compare},
        {"ids", no_argument, nullptr, ids},               {nullptr, 0, nullptr, 0}};
    for (int code; (code = getopt_long(count, arguments, "m:p:f:n:t:h", known, nullptr)) != -1;) {
        switch (code) {
            case 'm': options.model = optarg; break;
            case 'p': options.prompt = optarg; break;
            case 'f': options.prompt = contents_of(optarg); break;
            case 'n': options.tokens = number_of<int64_t>("--tokens", optarg, 1, any, "a number above 0"); break;
            case 't': options.threads = number_of<int64_t>("--threads", optarg, 0, 4096, "0 to 4096"); break;
            case 'h': options.help = true; break;
            case draft_model: options.draft_model = optarg; break;
            case draft_len: options.draft_len = number_of<int64_t>("--draft-len", optarg, 0, 256, "0 to 256"); break;
            case rule: options.rule = rule_of(optarg); break;
            case temperature:
                options.temperature = number_of("--temperature", optarg, 0.0, 1e6, "0 or a positive number");
                break;
            case top_k: options.top_k = number_of<int64_t>("--top-k", optarg, 0, any, "0 or more"); break;
            case top_p: options.top_p = number_of("--top-p", optarg, 1e-9, 1.0, "above 0, up to 1"); break;
            case min_p: options.min_p = number_of("--min-p", optarg, 0.0, 1.0, "0 to 1"); break;
            case seed:
                options.seed = number_of<int64_t>("--seed", optarg, INT64_MIN, INT64_MAX, "an integer of 64 bits");
                break;
            case samples: options.samples = number_of<int64_t>("--samples", optarg, 1, any, "a number above 0"); break;
            case compare: options.compare = true; break;
            case ids: options.ids = true; break;
            default: throw UsageError("see speculate --help");  // getopt has said what is wrong
        }
    }
    if (options.draft_len < 0) {
        options.draft_len = options.draft_model.empty() ? 8 : 4;
    }
    if (!options.help && (options.model.empty() || options.prompt.empty() || optind < count)) {
        throw UsageError(optind < count           ? std::string("expected options, got '") + arguments[optind] + "'"
                         : options.model.empty() ? "--model: expected a GGUF file"
                                                  : "--prompt: expected a text, or --file");
    }
    return options;
}
