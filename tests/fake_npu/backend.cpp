// Collectives of the device: a backend in the place of HCCL that logs what a stream of its own would read and write,
// and moves the bytes through gloo, at once. Without gloo one rank plays its part alone: what it gathers is its own from
// every rank, and nothing else moves.
#include "log.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace fake_npu {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

// What torch_npu does by default (MULTI_STREAM_MEMORY_REUSE=1): a collective tells the allocator that its stream uses
// the tensors, keeps none of them alive, and takes that back when somebody waits, whose stream is then behind it. NCCL's
// keeps them until then, which is milder.
class FakeWork final : public Work {
 public:
  FakeWork(int64_t event, int64_t stream, const Tensors& tensors) : event_(event), stream_(stream) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.device().is_privateuseone() && tensor.storage().data() != nullptr) {
        uses_.emplace_back(tensor.storage().data(), tensor.storage().getWeakStorageImpl());
        log().add("keep for stream", stream_, reinterpret_cast<int64_t>(tensor.storage().data()));
      }
    }
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override { log().add("wait", stream_of_this_thread(), event_); }
  bool wait(std::chrono::milliseconds) override {
    if (event_ != 0) {
      synchronize();
    }
    for (const auto& [pointer, storage] : uses_) {
      const auto alive = storage.lock();
      if (alive && alive->data() == pointer) {
        log().add("no longer for stream", stream_, reinterpret_cast<int64_t>(pointer));
      }
    }
    uses_.clear();
    return true;
  }

 private:
  int64_t event_;  // 0: ran on the stream of its caller
  int64_t stream_;
  std::vector<std::pair<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>>> uses_;
};

Tensors flat(const std::vector<Tensors>& nested) {
  Tensors all;
  for (const Tensors& each : nested) {
    all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

Tensors as_cpu(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) {
    views.push_back(fake_npu::as_cpu(tensor));
  }
  return views;
}

std::vector<Tensors> as_cpu(const std::vector<Tensors>& nested) {
  std::vector<Tensors> views;
  for (const Tensors& each : nested) {
    views.push_back(as_cpu(each));
  }
  return views;
}

class FakeHccl final : public c10d::Backend {
 public:
  FakeHccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(rank, size), stream(new_stream()), carrier_(std::move(carrier)) {}

  const int64_t stream;

  const std::string getBackendName() const override { return "hccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    refuse_scaled(options.reduceOp);
    return run("allreduce", tensors, tensors, options.asyncOp, [&](c10d::Backend& carrier) {
      auto views = as_cpu(tensors);
      return carrier.allreduce(views, options);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", tensors, tensors, options.asyncOp, [&](c10d::Backend& carrier) {
      auto views = as_cpu(tensors);
      return carrier.broadcast(views, options);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    refuse_scaled(options.reduceOp);
    return run("reduce", tensors, tensors, options.asyncOp, [&](c10d::Backend& carrier) {
      auto views = as_cpu(tensors);
      return carrier.reduce(views, options);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; !carrier_ && i < outputs.size(); ++i) {
      for (at::Tensor& output : outputs[i]) {
        fake_npu::as_cpu(output).copy_(fake_npu::as_cpu(inputs[i]));
      }
    }
    return run("allgather", inputs, flat(outputs), options.asyncOp, [&](c10d::Backend& carrier) {
      auto outs = as_cpu(outputs);
      auto ins = as_cpu(inputs);
      return carrier.allgather(outs, ins, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!carrier_) {
      gather_alone(output, input);
    }
    return run("allgather", {input}, {output}, options.asyncOp, [&](c10d::Backend& carrier) {
      auto out = fake_npu::as_cpu(output), in = fake_npu::as_cpu(input);
      return carrier._allgather_base(out, in, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; !carrier_ && i < outputs.size(); ++i) {
      gather_alone(outputs[i], inputs[i]);
    }
    return run("allgather", inputs, outputs, options.asyncOp, [&](c10d::Backend& carrier) {
      auto outs = as_cpu(outputs), ins = as_cpu(inputs);
      return carrier.allgather_into_tensor_coalesced(outs, ins, options);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    refuse_scaled(options.reduceOp);
    return run("reduce_scatter", flat(inputs), outputs, options.asyncOp, [&](c10d::Backend& carrier) {
      auto outs = as_cpu(outputs);
      auto ins = as_cpu(inputs);
      return carrier.reduce_scatter(outs, ins, options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    refuse_scaled(options.reduceOp);
    return run("reduce_scatter", {input}, {output}, options.asyncOp, [&](c10d::Backend& carrier) {
      auto out = fake_npu::as_cpu(output), in = fake_npu::as_cpu(input);
      return carrier._reduce_scatter_base(out, in, options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    refuse_scaled(options.reduceOp);
    return run("reduce_scatter", inputs, outputs, options.asyncOp, [&](c10d::Backend& carrier) {
      auto outs = as_cpu(outputs), ins = as_cpu(inputs);
      return carrier.reduce_scatter_tensor_coalesced(outs, ins, options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run("alltoall", {input}, {output}, options.asyncOp, [&](c10d::Backend& carrier) {
      auto out = fake_npu::as_cpu(output), in = fake_npu::as_cpu(input);
      return carrier.alltoall_base(out, in, output_sizes, input_sizes, options);
    });
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return run("send", tensors, {}, true, [&](c10d::Backend& carrier) {
      auto views = as_cpu(tensors);
      return carrier.send(views, target, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return run("recv", {}, tensors, true, [&](c10d::Backend& carrier) {
      auto views = as_cpu(tensors);
      return carrier.recv(views, source, tag);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    log().add("host waits for device", 0);
    return run("barrier", {}, {}, true, [&](c10d::Backend& carrier) { return carrier.barrier(options); });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> carrier_;

  void gather_alone(const at::Tensor& output, const at::Tensor& input) {
    const at::Tensor own = fake_npu::as_cpu(input).clone();  // may be a part of the output
    fake_npu::as_cpu(output).view({getSize(), -1}).copy_(own.view({1, -1}).expand({getSize(), -1}));
  }

  // As HCCL: no averages and no PREMUL_SUM.
  static void refuse_scaled(const c10d::ReduceOp& op) {
    TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX ||
                    op == c10d::ReduceOp::PRODUCT,
                "the fake HCCL reduces by sum, product, min and max alone");
  }

  template <typename Move>
  WorkPtr run(const char* name, const Tensors& inputs, const Tensors& outputs, bool is_async, Move&& move) {
    const int64_t caller = stream_of_this_thread(), place = is_async ? stream : caller;
    if (is_async) {
      const int64_t start = new_event();
      log().add("record", caller, start);
      log().add("wait", place, start);
    }
    for (const at::Tensor& tensor : inputs) {
      log_access(tensor, place, "read", name);
    }
    for (const at::Tensor& tensor : outputs) {
      log_access(tensor, place, "write", name);
    }
    if (carrier_) {
      move(*carrier_)->wait();
    }
    if (!is_async) {
      return c10::make_intrusive<FakeWork>(0, place, Tensors{});
    }
    const int64_t end = new_event();
    log().add("record", place, end);
    Tensors used = inputs;
    used.insert(used.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<FakeWork>(end, place, used);
  }
};

}  // namespace
}  // namespace fake_npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using fake_npu::log;
  fake_npu::register_hooks();
  py::module_::import("torch.distributed");
  py::class_<fake_npu::FakeHccl, c10d::Backend, c10::intrusive_ptr<fake_npu::FakeHccl>>(m, "FakeHccl")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>>(), py::arg("rank"), py::arg("size"),
           py::arg("carrier").none(true))
      .def_readonly("stream", &fake_npu::FakeHccl::stream);
  m.def("start_log", [] { log().take(); log().is_on = true; });
  m.def("stop_log", [] {
    log().is_on = false;
    py::list entries;
    for (const auto& e : log().take()) {
      entries.append(py::make_tuple(e.kind, e.stream, e.subject, e.start, e.end, e.name));
    }
    return entries;
  });
  m.def("mark", [](const std::string& name) { log().add("mark", fake_npu::stream_of_this_thread(), 0, 0, 0, name); });
  m.def("set_events_pending", [](bool pending) { log().events_are_pending = pending; });
  m.def("current_stream", &fake_npu::stream_of_this_thread);
  m.def("set_current_stream", &fake_npu::set_stream_of_this_thread);
  m.def("memory_allocated", &fake_npu::allocated_bytes);
  m.def("max_memory_allocated", &fake_npu::peak_bytes);
  m.def("reset_peak", &fake_npu::reset_peak);
  m.def("synchronize", [] { log().add("host waits for device", 0); });
}
