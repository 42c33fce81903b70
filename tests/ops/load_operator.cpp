// Loads torch's operators without Python and calls one: load_operator path/to/_C.so
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <vector>

using torch::stable::Tensor;

template <typename Value>
StableIValue as_value(const Value& value) {
    return torch::stable::detail::from(value);
}

template <typename Element>
Tensor tensor(std::initializer_list<int64_t> sizes, int32_t dtype, Element (*value)(int64_t)) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t dim = sizes.size() - 1; dim-- > 0;) {
        strides[dim] = strides[dim + 1] * sizes.begin()[dim + 1];
    }
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(),
                                                    dtype, aoti_torch_device_type_cpu(), 0, &handle));
    Tensor made(handle);
    auto* data = static_cast<Element*>(made.mutable_data_ptr());
    for (int64_t index = 0; index < made.numel(); ++index) {
        data[index] = value(index);
    }
    return made;
}

int main(int, char** arguments) {
    if (dlopen(arguments[1], RTLD_NOW) == nullptr) {
        std::puts(dlerror());
        return 1;
    }
    const auto count = [](int64_t index) { return index; };
    const auto logit = [](int64_t index) { return static_cast<float>(index * index % 11) / 3; };
    const std::vector<Tensor> members{tensor<float>({2, 3, 8}, aoti_torch_dtype_float32(), logit)};
    const std::vector<Tensor> random{tensor<int64_t>({2}, aoti_torch_dtype_int64(), count),
                                     tensor<int64_t>({2}, aoti_torch_dtype_int64(), count)};
    const Tensor drafts = tensor<int64_t>({2, 2}, aoti_torch_dtype_int64(), count);
    const std::optional<Tensor> no_tensor;
    const std::optional<std::vector<Tensor>> no_tensors;
    const std::optional<std::vector<std::optional<Tensor>>> no_rows;
    const std::optional<std::vector<double>> no_numbers;
    const std::optional<std::vector<int64_t>> no_logprobs;
    const int64_t max_draft_len = -1, drafter = 0;
    std::array<StableIValue, 19> stack{as_value(members),
                                       as_value(drafts),
                                       as_value(no_tensor),  // row_offsets
                                       as_value(no_tensor),  // draft_lens
                                       as_value(max_draft_len),
                                       as_value(drafter),
                                       as_value(no_tensor),   // drafters
                                       as_value(no_tensors),  // draft_logits
                                       as_value(no_numbers),  // draft_sampling
                                       as_value(true),        // process_drafts
                                       as_value(no_tensor),   // allowed
                                       as_value(no_numbers),  // ensemble
                                       as_value(std::optional(std::vector<double>{0.7, 5, 0.9, 0, 0})),  // sampling
                                       as_value(no_rows),                                                // rows
                                       as_value(no_numbers),                                             // processing
                                       as_value(no_rows),  // processing_rows
                                       as_value(std::optional(random)),
                                       as_value(no_numbers),  // rule
                                       as_value(no_logprobs)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("specens::verify_chain", "", stack.data(), TORCH_ABI_VERSION));
    const auto results = torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
    for (int64_t index = 0; index < results[0].numel(); ++index) {
        std::printf("%ld ", static_cast<long>(static_cast<const int64_t*>(results[0].const_data_ptr())[index]));
    }
}
