-- Shared: what a signature asks for. Its name is `<letter><gpus>.<vram>.<cpus>.<memory>.<disk>.<hash>` (MiB), so amounts
-- are read without a look-up. Letter: c = CPU, g = GPU of the kinds that matching allowed, a = a GPU if free, else CPU.

local parsed, how_many = {}, 0  -- of a name always the same comes out: kept for the names that were asked for last

local function parse(sig)
  local a, g, v, c, m, d = string.match(sig, '^(%a)(%d+)%.(%d+)%.(%d+)%.(%d+)%.(%d+)%.')
  if not a then return nil end
  return {letter = a, gpus = tonumber(g), vram = tonumber(v), cpus = tonumber(c), memory = tonumber(m), disk = tonumber(d),
          held = c .. ' ' .. m}
end

function H.amounts(sig)
  local need = parsed[sig]
  if need then return need end
  need = parse(sig)
  if not need then return nil end
  if how_many == 4096 then parsed, how_many = {}, 0 end
  parsed[sig], how_many = need, how_many + 1
  return need
end

-- lots of distinct devices, of an allowed group, with enough free memory; nil where there are too few
function H.pick_lots(lots, need, groups)
  local out, seen = {}, {}
  if need.gpus == 0 then return out end
  local allowed = ',' .. groups .. ','
  for _, lot in ipairs(lots) do
    if not seen[lot.uuid] and lot.free >= need.vram and string.find(allowed, ',' .. lot.group .. ',', 1, true) then
      seen[lot.uuid] = true
      out[#out + 1] = lot
      if #out == need.gpus then return out end
    end
  end
  if need.letter == 'a' then return {} end
  return nil
end

-- does `need` fit into `room` ({cpus, memory, disk, lots})? returns the lots to take
function H.fit(room, need, groups)
  if need.cpus > room.cpus or need.memory > room.memory or need.disk > room.disk then return nil end
  return H.pick_lots(room.lots, need, groups)
end
