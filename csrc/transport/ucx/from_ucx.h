#pragma once

// How UCX calls this code: every callback about a message or an endpoint is a
// function of FromUcx. UCX calls three more functions, which have no object and
// no token: onUcxLog() in status.cpp, and what unfinished_endpoints.cpp puts in
// the place of functions of UCX.

#include "base/boundary.h"
#include "base/buffer.h"

#include <ucp/api/ucp.h>

#include <functional>
#include <memory>
#include <type_traits>

namespace torch_rpc_ext::transport::ucx {

template <typename Member>
struct ClassOfMember;
template <typename T, typename Result, typename... Arguments>
struct ClassOfMember<Result (T::*)(Arguments...)> {
  using Type = T;
};

// Calls `run` with the token and the arguments that UCX gives. `run` is a
// member function of the object that was registered with the callback; this
// object has a worker(). UCX calls back only while this thread is inside of an
// operation or of progress, so this thread holds the lock of that worker.
//
// UCX is C, so no exception may pass through it: an exception of `run` ends
// here, and `failed` is called instead, with the token and either the error
// alone, or UCX's arguments and the error. Without `failed`, `run` is called
// once more.
template <base::Boundary boundary, auto run, auto failed = run>
class FromUcx {
  using Target = typename ClassOfMember<decltype(run)>::Type;

 public:
  // ucp_am_recv_callback_t; run(Locked&, header, data)
  static ucs_status_t message(
      void* target,
      const void* header,
      size_t headerLength,
      void* data,
      size_t length,
      const ucp_am_recv_param_t* param) noexcept {
    // This transport sends nothing by UCX's rendezvous, so such a message is
    // from no peer of this group and is dropped.
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      enter(
          target,
          base::ConstSpan{header, headerLength},
          base::ConstSpan{data, length});
    }
    return UCS_OK;
  }

  // ucp_send_nbx_callback_t; run(Locked&, status)
  static void sent(void* request, ucs_status_t status, void* target) noexcept {
    ucp_request_free(request);
    enter(target, status);
  }

  // The same for a target that was made for this one send: the target is
  // deleted afterwards.
  static void
  sentLast(void* request, ucs_status_t status, void* target) noexcept {
    const std::unique_ptr<Target> owned(static_cast<Target*>(target));
    sent(request, status, target);
  }

  // ucp_tag_recv_nbx_callback_t; run(Locked&, request, status, info)
  static void received(
      void* request,
      ucs_status_t status,
      const ucp_tag_recv_info_t* info,
      void* target) noexcept {
    enter(target, request, status, info);
    ucp_request_free(request);
  }

  // ucp_err_handler_cb_t; run(Locked&, endpoint, status)
  static void
  broken(void* target, ucp_ep_h endpoint, ucs_status_t status) noexcept {
    enter(target, endpoint, status);
  }

 private:
  template <typename... Said>
  static void enter(void* argument, Said... said) noexcept {
    auto& target = *static_cast<Target*>(argument);
    auto& locked = target.worker().held();
    using Token = decltype(locked);
    base::guarded(
        boundary,
        [&] { std::invoke(run, target, locked, said...); },
        [&]([[maybe_unused]] const base::Error& error) {
          if constexpr (
              std::is_invocable_v<
                  decltype(failed),
                  Target&,
                  Token,
                  const base::Error&>) {
            std::invoke(failed, target, locked, error);
          } else if constexpr (
              std::is_invocable_v<
                  decltype(failed),
                  Target&,
                  Token,
                  Said...,
                  const base::Error&>) {
            std::invoke(failed, target, locked, said..., error);
          } else {
            std::invoke(failed, target, locked, said...);
          }
        });
  }
};

} // namespace torch_rpc_ext::transport::ucx
