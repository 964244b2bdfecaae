#include "agent/ucx_agent.h"
#include "bindings/bindings.h"
#include "bindings/ptx_source.h"
#include "bindings/python_thread.h"
#include "bindings/remote_exception.h"
#include "bindings/request_callback.h"
#include "compat/absent_agent.h"
#include "compat/torch_compat.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;
using agent::AgentOptions;
using agent::AnswerWait;
using agent::UcxAgent;

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// Releases the GIL while it destroys the object: the destructor waits for the
// agent's threads, which may need the GIL to end.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    if (PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      delete object;
    } else {
      delete object;
    }
  }
};

// Calls a function of unread_rrefs.py with a payload. What the function raises
// is printed, as Python does where nobody can catch an exception.
std::function<void(const std::string&)> unreadRRefsHook(const char* name) {
  return [name](const std::string& payload) {
    const py::gil_scoped_acquire gil;
    try {
      py::module_::import("torch_rpc_ext._upstream.unread_rrefs")
          .attr(name)(py::bytes(payload));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(name);
    }
  };
}

agent::AgentHooks pythonHooks() {
  return {
      // Runs when upstream starts the agent. Upstream has made the agent the
      // current one before.
      .start =
          [] {
            if (rpc::RpcAgent::isCurrentRpcAgentSet()) {
              compat::renewRRefContext(rpc::RpcAgent::getCurrentRpcAgent());
            }
          },
      .checkInterrupt = checkInterrupt,
      .threadScope = poolThread,
      .dropValues =
          [](agent::RRefs values) {
            py::gil_scoped_acquire gil;
            values.clear();
          },
      .undelivered = unreadRRefsHook("undelivered"),
      .unread = unreadRRefsHook("unread"),
      .decodeException = decodeRemoteException,
      .encodeException = encodeRemoteException,
      .kernels = pythonPtxSource()};
}

std::shared_ptr<UcxAgent> makeAgent(
    const AgentOptions& options,
    const std::string& name,
    rpc::worker_id_t id,
    bool isStatic) {
  letThreadsOutliveTheInterpreter();
  if (!rpc::RpcAgent::isCurrentRpcAgentSet()) {
    compat::letFormerAgentGo();
  }
  return std::shared_ptr<UcxAgent>(
      new UcxAgent(
          options,
          name,
          id,
          isStatic,
          makeRequestCallback(options.allowed, name),
          pythonHooks()),
      DeleteWithoutGil<UcxAgent>());
}

// Sets all options of agent_options.h, and requires a value for each.
void setOptions(AgentOptions& options, const py::dict& values) {
  size_t taken = 0;
  agent::forEachOption(options, [&](const char* name, auto& member) {
    member = values[name].cast<std::decay_t<decltype(member)>>();
    ++taken;
  });
  if (taken != values.size()) {
    throw py::key_error("the agent does not have all of these options");
  }
}

void bindOptions(py::module_& module) {
  py::class_<AgentOptions>(module, "AgentOptions")
      .def(py::init<>())
      .def("set_values", &setOptions, py::arg("values"))
      .def(
          "set_interfaces",
          [](AgentOptions& o,
             std::vector<std::string> names,
             bool isExplicit,
             bool preferIpv6) {
            o.transport.interfaces = std::move(names);
            o.transport.interfacesExplicit = isExplicit;
            o.transport.preferIpv6 = preferIpv6;
          },
          py::arg("names"),
          py::arg("explicit"),
          py::arg("prefer_ipv6"))
      .def(
          "set_encryption",
          [](AgentOptions& o, int value) {
            o.transport.encryption =
                static_cast<transport::ucx::Encryption>(value);
          },
          py::arg("value"))
      .def(
          "set_wire_dtypes",
          [](AgentOptions& o,
             int others,
             const std::unordered_map<std::string, int>& workers) {
            o.wireDtypes.others = static_cast<wire::WireDtype>(others);
            for (const auto& [worker, dtype] : workers) {
              o.wireDtypes.workers[worker] =
                  static_cast<wire::WireDtype>(dtype);
            }
          },
          py::arg("others"),
          py::arg("workers"))
      .def(
          "allow_only",
          [](AgentOptions& o,
             std::unordered_set<std::string> names,
             std::unordered_set<std::string> modules) {
            o.allowed = {
                .everything = false,
                .names = std::move(names),
                .modules = std::move(modules)};
          },
          py::arg("names"),
          py::arg("modules"));
}

std::vector<std::map<std::string, std::string>> describePeers(UcxAgent& agent) {
  std::vector<std::map<std::string, std::string>> peers;
  for (const auto& [name, path] : agent.parts().group().peers().paths()) {
    const auto devices = agent.parts().devices().describe(name);
    peers.push_back(
        {{"worker", name},
         {"state", path.state},
         {"control", path.control},
         {"bulk", path.bulk},
         {"why", path.why},
         {"devices", devices.way},
         {"devices_why", devices.why}});
  }
  return peers;
}

std::map<std::string, std::pair<uint64_t, uint64_t>> describeWaiting(
    const UcxAgent& agent) {
  std::map<std::string, std::pair<uint64_t, uint64_t>> waiting;
  for (const auto& [name, load] : agent.parts().receiver().waitingCallers()) {
    waiting[name] = {load.waitingRequests, load.waitingBytes};
  }
  return waiting;
}

using PlainHistogram =
    std::tuple<std::vector<uint64_t>, std::vector<uint64_t>, uint64_t>;

std::map<std::string, PlainHistogram> describeHistograms(
    const UcxAgent& agent) {
  std::map<std::string, PlainHistogram> plain;
  for (auto& [name, histogram] : agent.histograms()) {
    plain[name] = {histogram.bounds, histogram.counts, histogram.sum};
  }
  return plain;
}

// As tuples; the Python profiler gives the fields names.
py::tuple toPlain(const std::vector<metrics::LoggedCall>& calls) {
  py::list plain;
  for (const auto& call : calls) {
    plain.append(
        py::make_tuple(
            call.id,
            call.peer,
            call.label,
            call.begin,
            call.start,
            call.end,
            call.gilWait,
            call.bytes,
            call.failed));
  }
  return py::tuple(plain);
}

void bindProfiling(
    py::class_<UcxAgent, rpc::RpcAgent, std::shared_ptr<UcxAgent>>& agent) {
  agent.def("get_histograms", &describeHistograms, Release())
      .def(
          "begin_call_log", &UcxAgent::beginCallLog, Release(), py::arg("most"))
      .def(
          "end_call_log",
          [](UcxAgent& self) {
            const auto logged = self.endCallLog();
            return py::make_tuple(toPlain(logged.sent), toPlain(logged.served));
          })
      .def_static("last_call_id", [] { return AnswerWait::lastCall().id; });
}

void bindGroup(
    py::class_<UcxAgent, rpc::RpcAgent, std::shared_ptr<UcxAgent>>& agent) {
  agent
      .def_property_readonly(
          "address",
          [](UcxAgent& self) {
            return py::bytes(self.parts().group().address());
          })
      .def_property_readonly(
          "group_id",
          [](UcxAgent& self) {
            return py::bytes(self.parts().group().membership().group());
          })
      .def_property_readonly(
          "is_static_group",
          [](UcxAgent& self) { return self.parts().group().isStatic(); })
      .def(
          "set_group",
          [](UcxAgent& self,
             const py::bytes& group,
             const std::vector<
                 std::
                     tuple<std::string, rpc::worker_id_t, py::bytes, uint32_t>>&
                 members,
             const py::bytes& secret) {
            self.parts().group().setSecret(group, secret);
            for (const auto& [name, id, address, life] : members) {
              self.parts().group().add(name, id, address, life);
            }
          },
          py::arg("group"),
          py::arg("members"),
          py::arg("secret"))
      .def(
          "add_member",
          [](UcxAgent& self,
             const std::string& name,
             rpc::worker_id_t id,
             const py::bytes& address,
             uint32_t life) {
            std::string bytes = address;
            py::gil_scoped_release release;
            self.parts().group().add(name, id, std::move(bytes), life);
          },
          py::arg("name"),
          py::arg("worker_id"),
          py::arg("address"),
          py::arg("life"))
      .def(
          "remove_member",
          [](UcxAgent& self, const std::string& name) {
            self.parts().group().remove(name);
          },
          py::arg("name"))
      // Upstream's class has this function without the overload for an id; a
      // function of the same name here hides all of its overloads.
      .def(
          "get_worker_info",
          [](const UcxAgent& self) -> const rpc::WorkerInfo& {
            return static_cast<const rpc::RpcAgent&>(self).getWorkerInfo();
          },
          Release())
      .def(
          "get_worker_info",
          [](const UcxAgent& self, const std::string& name)
              -> const rpc::WorkerInfo& { return self.getWorkerInfo(name); },
          Release())
      .def(
          "get_worker_info",
          [](const UcxAgent& self,
             rpc::worker_id_t id) -> const rpc::WorkerInfo& {
            // Not getWorkerInfo(id), which also finds workers that have left.
            return self.parts().group().membership().byId(id);
          },
          Release())
      .def(
          "lost_workers",
          [](UcxAgent& self) { return self.parts().group().peers().lost(); },
          Release())
      .def(
          "watch",
          [](UcxAgent& self, rpc::worker_id_t id) {
            self.parts().group().watch(id);
          },
          Release(),
          py::arg("worker_id"))
      .def("describe_peers", &describePeers, Release());
}

} // namespace

void bindAgent(py::module_& module) {
  compat::keepRRefErrorsHarmless();
  bindOptions(module);
  module.def("set_synchronous", &AnswerWait::setSynchronous, py::arg("value"));
  module.def(
      "set_call_dtype",
      [](std::optional<int> dtype) -> std::optional<int> {
        std::optional<wire::WireDtype> chosen;
        if (dtype) {
          chosen = static_cast<wire::WireDtype>(*dtype);
        }
        const auto before = agent::setCallDtype(chosen);
        return before ? std::optional<int>(static_cast<int>(*before))
                      : std::nullopt;
      },
      py::arg("dtype"),
      "Set the dtype as which float32 travels in this thread's calls; returns "
      "the dtype that was set before.");
  module.def(
      "prepare_reinit",
      &compat::forgetAutogradWorker,
      "Lets init_rpc run again in this process with another rank.");
  // join(), shutdown(), get_metrics() and more come from upstream's class, and
  // call the virtual functions of UcxAgent.
  py::class_<UcxAgent, rpc::RpcAgent, std::shared_ptr<UcxAgent>> agent(
      module, "UcxAgent");
  bindGroup(agent);
  bindProfiling(agent);
  agent
      .def(
          py::init(&makeAgent),
          py::arg("options"),
          py::arg("name"),
          py::arg("worker_id"),
          py::arg("is_static"))
      .def(
          "set_device_maps",
          [](UcxAgent& self,
             std::unordered_map<std::string, rpc::DeviceMap> maps,
             std::unordered_map<std::string, rpc::DeviceMap> reverseMaps,
             std::vector<c10::Device> devices) {
            self.parts().devices().tables().set(
                std::move(maps), std::move(reverseMaps), std::move(devices));
          },
          py::arg("device_maps"),
          py::arg("reverse_device_maps"),
          py::arg("devices"))
      .def("waiting_callers", &describeWaiting, Release())
      .def("stop", &UcxAgent::stop, Release())
      .def_property_readonly("stopped", &UcxAgent::stopped)
      .def_property_readonly(
          "started",
          [](UcxAgent& self) { return self.parts().group().peers().started(); })
      .def("leak", [](const std::shared_ptr<UcxAgent>& self) {
        // For a forked child, where the agent must not be destroyed.
        self->abandon();
        new std::shared_ptr<UcxAgent>(self);
      });
}

} // namespace torch_rpc_ext::bindings
