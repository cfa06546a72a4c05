#pragma once

namespace k3 {

// Floating point operations a second of oneDNN's own matrix product on all threads in use, the best of about `seconds`: what "share of
// peak" is a share of.
double measured_peak_flops(double seconds = 0.2);

}  // namespace k3
