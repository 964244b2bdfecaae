#include "transport/ucx/ucp_context.h"

#include "base/log.h"
#include "transport/ucx/status.h"

#include <ifaddrs.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

namespace {

// A setting of ours holds only where the user has not said otherwise in UCX's
// own environment, unless it is what the user said to us.
void set(
    ucp_config_t* config,
    const char* key,
    const std::string& value,
    bool explicitly = false) {
  if (!explicitly &&
      std::getenv((std::string("UCX_") + key).c_str()) != nullptr) {
    return;
  }
  const ucs_status_t status = ucp_config_modify(config, key, value.c_str());
  if (status != UCS_OK) {
    base::log(
        base::LogLevel::kInfo,
        std::string("UCX does not know the setting ") + key + "=" + value +
            ": " + ucs_status_string(status));
  }
}

// UCX names RDMA devices in the same list as IP interfaces. To choose among the
// latter without losing the former, the others are excluded by name.
std::string excludedInterfaces(const std::vector<std::string>& wanted) {
  std::set<std::string> others;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
      others.insert(it->ifa_name);
    }
    freeifaddrs(list);
  }
  for (const auto& name : wanted) {
    others.erase(name);
  }
  std::string text;
  for (const auto& name : others) {
    text += (text.empty() ? "^" : ",") + name;
  }
  return text;
}

void configure(ucp_config_t* config, const Options& options) {
  // CMA is done by ourselves (cma.h says why); CUDA memory never reaches UCX.
  set(config,
      "TLS",
      options.useSharedMemory ? "^cma,cuda_copy,cuda_ipc,gdr_copy"
                              : "^shm,cma,cuda_copy,cuda_ipc,gdr_copy");
  if (!options.interfaces.empty()) {
    const std::string excluded = excludedInterfaces(options.interfaces);
    if (!excluded.empty()) {
      set(config, "NET_DEVICES", excluded, options.interfacesExplicit);
    }
  }
  // Without it, endpoints that notice errors silently avoid shared memory.
  set(config, "MM_ERROR_HANDLING", "y");
  set(config,
      "KEEPALIVE_INTERVAL",
      std::to_string(
          std::max(1, static_cast<int>(options.keepaliveSeconds * 500))) +
          "ms");
  if (options.portLow != 0) {
    set(config,
        "TCP_PORT_RANGE",
        std::to_string(options.portLow) + "-" +
            std::to_string(options.portHigh),
        /*explicitly=*/true);
  }
  set(config, "TCP_AF_PRIO", options.preferIpv6 ? "inet6,inet" : "inet,inet6");
  set(config, "MAX_RNDV_RAILS", "4"); // as many NICs as there are, to a point
  set(config, "WARN_UNUSED_ENV_VARS", "n");
}

} // namespace

base::Result<std::shared_ptr<UcpContext>> UcpContext::create(
    const Options& options) {
  captureUcxLog();
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    return toError(status, "reading UCX's configuration");
  }
  configure(config, options);

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME |
      UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.name = "torch_rpc_ext";
  params.mt_workers_shared = 1; // control and bulk workers share the context
  ucp_context_h context = nullptr;
  status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return toError(status, "opening UCX (ucp_init)");
  }
  return std::shared_ptr<UcpContext>(new UcpContext(context));
}

UcpContext::~UcpContext() {
  ucp_cleanup(context_);
}

} // namespace torch_rpc_ext::transport::ucx
