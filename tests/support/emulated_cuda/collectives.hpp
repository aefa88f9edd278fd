// What NCCL does, by gloo: tensors go to host memory, are joined there, and come back.
//
// Work is begun at once and finished aside, as on a stream: it may be looked at while it goes on. Each
// group has a stream, which comes after the one in use, and which `wait` has the one in use follow.
#pragma once

#include "memory.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <future>

namespace emulated {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline Tensors copied(const Tensors& tensors) {
  const Unseen inside;
  Tensors made;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense, got ", tensor.device());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    made.push_back(tensor.to(at::kCPU));
  }
  return made;
}

inline void copy_back(const Tensors& to, const Tensors& from) {
  at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;  // as what NCCL writes is
  const Unseen inside;
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

// A piece of work that ends when `rest` has returned.
class Aside final : public c10d::Work {
 public:
  Aside(c10d::OpType kind, Tensors outputs, int device, Clock end, std::function<void()> rest)
      : Work(0, kind), outputs_(std::move(outputs)), device_(device), end_(std::move(end)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    done_ = std::async(std::launch::async, [future = future_, outputs = outputs_, rest] {
      try {
        rest();
        future->markCompleted(c10::IValue(outputs));
      } catch (...) {
        future->setError(std::current_exception());
        throw;
      }
    }).share();
  }
  bool isCompleted() override {
    const bool is_over = done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    if (is_over) emulated::finish(end_);
    return is_over;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    done_.get();
    const Hold hold;
    Order::held().follow({device_, current_streams.at(device_)}, end_);
    const bool stops_host = retrieveOpType() == c10d::OpType::BARRIER;
    if (stops_host || std::getenv("TORCH_NCCL_BLOCKING_WAIT") != nullptr) emulated::finish(end_);
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  int device_;
  Clock end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_future<void> done_;
};

class Collectives final : public c10d::Backend {
 public:
  // The first use waits for the others to come to theirs: so does NCCL's communicator.
  Collectives(int rank, int size, py::function make_gloo)
      : Backend(rank, size), make_gloo_(new py::function(std::move(make_gloo))),
        number_(--next_number) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override {
    if (gloo_) gloo_->abort();
  }
  void shutdown() override {
    if (gloo_) gloo_->shutdown();
  }

  void startCoalescing() override { group_ = Group{}; }
  WorkPtr endCoalescing() override {
    Group group = std::move(*group_);
    group_.reset();
    return aside(c10d::OpType::COALESCED, {}, [group] {
      for (const auto& work : group) work->wait();
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on_host = hosts(tensors);
    return finish(c10d::OpType::BROADCAST, tensors, on_host, gloo()->broadcast(on_host, options));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto on_host = hosts(tensors);
    return reduced(c10d::OpType::ALLREDUCE, tensors, on_host, options, [](const at::Tensor& sum) {
      return sum;
    });
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors, [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto from = hosts(inputs);
    std::vector<Tensors> to{hosts(outputs.at(0))};
    return finish(c10d::OpType::ALLGATHER, outputs[0], to[0], gloo()->allgather(to, from, options));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    auto both = hosts({output, input});
    auto work = gloo()->_allgather_base(both[0], both[1], options);
    return finish(c10d::OpType::_ALLGATHER_BASE, {output}, {both[0]}, work);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return each(outputs, [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    auto on_host = hosts({input});
    auto mine = [rank = rank_, size = size_, shape = output.sizes().vec()](const at::Tensor& sum) {
      return sum.reshape({size, -1})[rank].reshape(shape);
    };
    return reduced(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, on_host, all, mine);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return each(outputs, [&](size_t i) {
      Tensors flat;
      for (const auto& part : inputs[i]) flat.push_back(part.reshape(-1));
      auto whole = at::cat(flat);
      return _reduce_scatter_base(outputs[i], whole, options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return each(outputs, [&](size_t i) {
      return _reduce_scatter_base(outputs[i], inputs[i], options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to,
                        std::vector<int64_t>& from, const c10d::AllToAllOptions& options) override {
    auto both = hosts({output, input});
    auto work = gloo()->alltoall_base(both[0], both[1], to, from, options);
    return finish(c10d::OpType::ALLTOALL_BASE, {output}, {both[0]}, work);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    auto to = hosts(outputs);
    std::vector<Tensors> from;
    for (const auto& parts : inputs) from.push_back(hosts(parts));
    return finish(c10d::OpType::SCATTER, outputs, to, gloo()->scatter(to, from, options));
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto on_host = hosts(tensors);
    auto work = gloo()->send(on_host, to, tag);
    return grouped(aside(c10d::OpType::SEND, {}, [work, on_host] { work->wait(); }));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto on_host = hosts(tensors);
    return grouped(
        finish(c10d::OpType::RECV, tensors, on_host, gloo()->recv(on_host, from, tag)));
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto on_host = options;
    on_host.device_ids.clear();
    on_host.device.reset();
    auto work = gloo()->barrier(on_host);
    return aside(c10d::OpType::BARRIER, {}, [work] { work->wait(); });
  }

 private:
  using Group = std::vector<WorkPtr>;

  c10d::Backend* gloo() {
    if (!gloo_) {
      const py::gil_scoped_acquire python;
      gloo_ = (*make_gloo_)().cast<c10::intrusive_ptr<c10d::Backend>>();
    }
    return gloo_.get();
  }
  Tensors hosts(const Tensors& tensors) {
    read_.insert(read_.end(), tensors.begin(), tensors.end());
    return copied(tensors);
  }
  // Whatever was copied since the last piece of work is what this one reads.
  WorkPtr aside(c10d::OpType kind, Tensors outputs, std::function<void()> rest) {
    const Hold hold;
    const int device = read_.empty() ? current_device : read_[0].device().index();
    const Key stream{device, number_};
    Order::held().follow(stream, Order::held().at({device, current_streams.at(device)}));
    Seen seen(stream, c10d::opTypeToString(kind));
    for (const auto& tensor : read_) note(seen, tensor, false);
    for (const auto& tensor : outputs) note(seen, tensor, true);
    read_.clear();
    return c10::make_intrusive<Aside>(kind, std::move(outputs), device, Order::held().at(stream),
                                      std::move(rest));
  }
  // A group keeps its memory until it is done.
  static void note(Seen& seen, const at::Tensor& tensor, bool writes) {
    seen.access(tensor, writes);
    seen.keep(tensor);
  }
  WorkPtr finish(c10d::OpType kind, const Tensors& to, const Tensors& from, WorkPtr work) {
    return aside(kind, to, [to, from, work] {
      work->wait();
      copy_back(to, from);
    });
  }
  WorkPtr reduced(c10d::OpType kind, const Tensors& to, Tensors& on_host,
                  c10d::AllreduceOptions options,
                  std::function<at::Tensor(const at::Tensor&)> mine) {
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;  // gloo has none
    if (is_mean) options.reduceOp = c10d::ReduceOp::SUM;
    auto work = gloo()->allreduce(on_host, options);
    return aside(kind, to, [to, from = on_host, work, mine, is_mean, size = size_] {
      work->wait();
      Tensors results;
      for (const auto& sum : from) results.push_back(is_mean ? mine(sum) / size : mine(sum));
      copy_back(to, results);
    });
  }
  WorkPtr each(const Tensors& outputs, const std::function<WorkPtr(size_t)>& begin) {
    Group group;
    for (size_t i = 0; i < outputs.size(); ++i) group.push_back(begin(i));
    return aside(c10d::OpType::COALESCED, outputs, [group] {
      for (const auto& work : group) work->wait();
    });
  }
  WorkPtr grouped(WorkPtr work) {
    if (group_) group_->push_back(work);
    return work;
  }

  inline static std::atomic<int64_t> next_number = 0;
  py::function* make_gloo_;  // never deleted, as that wants the interpreter's lock
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t number_;
  Tensors read_;
  std::optional<Group> group_;
};

}  // namespace emulated
