// Bits of a request's status, which `specens_kernels.Status` has too.
#pragma once

#include <cstdint>

#include "include/specens.h"

namespace specens {

enum Status : int32_t {
    status_ok = 0,
    status_nan_logits = SPECENS_STATUS_NAN_LOGITS,
    status_infinite_logits = SPECENS_STATUS_INFINITE_LOGITS,
    status_no_token = SPECENS_STATUS_NO_TOKEN,
    status_member_without_token = SPECENS_STATUS_MEMBER_WITHOUT_TOKEN,
    status_invalid_draft_token = SPECENS_STATUS_INVALID_DRAFT_TOKEN,
    status_invalid_draft_distribution = SPECENS_STATUS_INVALID_DRAFT_DISTRIBUTION,
    status_empty_residual = SPECENS_STATUS_EMPTY_RESIDUAL,
    status_invalid_parameter = SPECENS_STATUS_INVALID_PARAMETER,
};

}  // namespace specens
